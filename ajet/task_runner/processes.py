"""`ProcessRunner`: attempts in worker processes, each forked from a server that has imported the user's code.

This is `wrapper_type: multi-processing`. The fork server is a small process that imports the user's code once and forks
a worker for each attempt; it never imports torch, has one thread and holds no model. With `process_lifetime: run`, a
worker that has ended an attempt is given another. `worker.py` is what a worker does. Model calls go through the
gateway; task, reward and metadata cross as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from ajet.environment.environment import EnvironmentSource, find_source
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Failure
from ajet.schema.errors import ImportPathError, UserError
from ajet.schema.task import WorkflowTask
from ajet.system.forking import PACKET
from ajet.task_runner.attempt import EndedEarly, OpenSession, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.environments import EnvironmentEndings, environment_settings
from ajet.task_runner.worker import FREE, LINE_LIMIT

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)

BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from ajet.task_runner.worker import main; main(int(sys.argv[2]))"  # noqa: E501
STDERR_KEPT = 16 * 1024
"""How much of the end of a worker's standard error is kept: enough for a traceback and what led to it."""
EXIT_NOTICE_S = 2.0
"""How long to wait for a worker's exit status after its channel has closed."""
MOST_EVENTS = 10_000
"""The most environment events accepted from a worker: more than an honest one sends."""
DUMP_S = 0.1
"""How long a worker has to print its stack before it is killed."""
CLEARING_S = 2.0
"""How long a worker that stays has, after its result, to end what user code left running."""


class ForkServerClient:
    """Starts the fork server and sends it commands. `ready` waits until the server has imported the user's code."""

    def __init__(self, config: Config, base_dirs: Sequence[Path] = ()) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to the process that runs the episodes, which ends this one
        )
        theirs.close()
        setup = {"config": config.model_dump(mode="json"), "base_dirs": [str(folder) for folder in base_dirs]}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ready` will report it
            self._process.stdin.write(json.dumps(setup).encode())
            self._process.stdin.close()
        self._numbers = itertools.count(1)
        self._exits: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] | None = None

    @property
    def died(self) -> bool:
        """Whether the server has ended after it was ready."""
        ready = self._ready is not None and self._ready.done() and self._ready.exception() is None
        return ready and self._process.poll() is not None

    async def ready(self) -> None:
        """Raises ImportPathError if the user's code can't be imported."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._ours.setblocking(False)
            loop.add_reader(self._ours, self._receive)
        await asyncio.shield(self._ready)

    def start(self, channel: socket.socket, stderr: int) -> int:
        """Fork a worker with these descriptors. Returns its number."""
        number = next(self._numbers)
        self._exits[number] = asyncio.get_running_loop().create_future()
        command = json.dumps({"do": "start", "number": number}).encode()
        socket.send_fds(self._ours, [command], [channel.fileno(), stderr])
        return number

    def command(self, do: Literal["kill", "dump"], number: int) -> None:
        """`kill` a worker and everything it started, or have it `dump` its stack."""
        closed = self._ours.fileno() < 0  # then the server has already ended its workers
        if number in self._exits and not closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then all workers are dead
                self._ours.send(json.dumps({"do": do, "number": number}).encode())

    async def exit_of(self, number: int) -> str:
        """Describe how a worker ended."""
        try:
            event = await asyncio.wait_for(asyncio.shield(self._exits[number]), EXIT_NOTICE_S)
        except TimeoutError:
            return "closed its channel"
        code = event.get("code")
        if code is None:
            return str(event.get("error"))
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def forget(self, number: int) -> None:
        """Drop what is kept about this worker."""
        self._exits.pop(number, None)

    def close(self) -> None:
        """End the server and all its workers."""
        if self._ready is not None:
            asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> None:
        assert self._ready is not None
        try:
            packet = self._ours.recv(PACKET)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self._ours)
            gone = UserError("the server of isolated workflows ended while it imported them: see its output above")
            if not self._ready.done():
                self._ready.set_exception(gone)
            for waiting in self._exits.values():
                if not waiting.done():
                    waiting.set_result({"error": "lost its fork server"})
            return
        event = json.loads(packet)
        if event["event"] == "ready":
            self._ready.set_result(None)
        elif event["event"] == "refused":
            self._ready.set_exception(ImportPathError(event["error"]))
        elif (ended := self._exits.get(event["number"])) is not None and not ended.done():
            ended.set_result(event)


class WorkerProcess:
    """A process of the fork server, and the descriptors that reach it."""

    def __init__(self, server: ForkServerClient) -> None:
        self._server = server
        self._channel, theirs = socket.socketpair()
        self._stderr, their_stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._said = bytearray()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._number: int | None = None
        self.not_started = ""
        """Why there is none."""
        try:
            self._number = server.start(theirs, their_stderr)
        except OSError as error:
            self.not_started = f"the fork server can't be reached: {error}"
        finally:
            theirs.close()
            os.close(their_stderr)
        asyncio.get_running_loop().add_reader(self._stderr, self._read_stderr)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Its channel."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._channel, limit=LINE_LIMIT)
        return self._streams

    @property
    def is_there(self) -> bool:
        """Whether it can be given another attempt, as far as is known."""
        return self._streams is not None and not self._streams[0].at_eof() and not self._server.died

    async def is_free(self) -> bool:
        """Wait until it has cleared up after an attempt. False if it doesn't."""
        reader, _ = await self.streams()
        try:
            async with asyncio.timeout(CLEARING_S):
                return bool(json.loads(await reader.readline()) == FREE)
        except (TimeoutError, ConnectionError, ValueError):  # user code hangs, ended it, or wrote to the channel
            return False

    def forget_output(self) -> None:
        """What it writes from now on belongs to another attempt."""
        self._read_stderr()
        self._said.clear()

    async def stack(self) -> str:
        """What it is doing, and what it wrote before."""
        if self._number is None:
            return ""
        self._server.command("dump", self._number)
        await asyncio.sleep(DUMP_S)
        return self.written()

    async def ending(self) -> str:
        """Describe how it ended."""
        assert self._number is not None
        return await self._server.exit_of(self._number)

    def written(self) -> str:
        """The end of what it wrote to its standard error."""
        self._read_stderr()
        return self._said.decode(errors="replace")

    def end(self) -> None:
        """Kill it and everything it started."""
        if self._number is not None:
            self._server.command("kill", self._number)
            self._server.forget(self._number)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._channel.close()
        asyncio.get_running_loop().remove_reader(self._stderr)
        os.close(self._stderr)

    def _read_stderr(self) -> None:
        """Forward what the worker wrote, and keep the end of it."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # a worker that writes endlessly must not block the service loop
                text = os.read(self._stderr, PACKET)
                if not text:
                    asyncio.get_running_loop().remove_reader(self._stderr)
                    return
                self._said += text
                del self._said[:-STDERR_KEPT]
                sys.stderr.write(text.decode(errors="replace"))


class WorkerProcesses:
    """The fork server's workers: a new one for each attempt, or, if they stay, one that has ended its last."""

    def __init__(self, config: Config, base_dirs: Sequence[Path]) -> None:
        self._config = config
        self._base_dirs = base_dirs
        self._stay = config.ajet.task_runner.process_lifetime == "run"
        self._idle: list[WorkerProcess] = []
        self._clearing: set[asyncio.Task[None]] = set()
        self._warned = False
        self._server = ForkServerClient(config, base_dirs)

    async def ready(self) -> None:
        """Replaces a server that died (its workers died with it)."""
        if self._server.died:
            log.warning("the fork server ended unexpectedly; starting another")
            self._server.close()
            self._server = ForkServerClient(self._config, self._base_dirs)
        await self._server.ready()

    def take(self) -> WorkerProcess:
        """A worker for one attempt."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_there:
                worker.forget_output()
                return worker
            worker.end()
        return WorkerProcess(self._server)

    def give_back(self, worker: WorkerProcess, *, has_answered: bool) -> None:
        """The attempt is over. A worker that hasn't answered may be doing anything."""
        if not self._stay or not has_answered:
            worker.end()
            return
        clearing = asyncio.get_running_loop().create_task(self._keep(worker))
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    async def _keep(self, worker: WorkerProcess) -> None:
        kept = False
        try:
            kept = await worker.is_free()
            if not kept and not self._warned:
                self._warned = True
                log.warning(
                    "a workflow's process could not be used again, and was replaced: after its result it ended, or "
                    "what the workflow had left running took longer than %g s to end",
                    CLEARING_S,
                )
        finally:
            if kept:
                self._idle.append(worker)
            else:
                worker.end()

    async def aclose(self) -> None:
        """End them all."""
        for clearing in list(self._clearing):
            clearing.cancel()
        await asyncio.gather(*self._clearing, return_exceptions=True)
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        self._server.close()


class ProcessRunner:
    """Runs attempts in processes. A crash, a hang or `os._exit` ends only that attempt."""

    def __init__(self, config: Config, sessions: SessionProvider, base_dirs: Sequence[Path] = ()) -> None:
        self._sessions = sessions
        self.workers = WorkerProcesses(config, base_dirs)
        self._world = environment_settings(config)
        self._service = find_source(self._world) if self._world is not None and self._world.url is not None else None
        """The service at which a killed worker's instances are ended. All other environments end with their process."""
        self._endings = EnvironmentEndings()

    async def ready(self) -> None:
        """The user's code is imported. Raises ImportPathError if it can't be."""
        await self.workers.ready()

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession, ended_early: EndedEarly) -> RunningAttempt:
        record = None
        if self._world is not None:
            record = EnvironmentRecord(self._world.source or self._world.url or "")
        end = _EnvironmentEnd(record, self._service, self._endings)
        return _AttemptInProcess(self.workers, self._sessions, workflow_task, open_session, ended_early, end)

    async def aclose(self) -> None:
        await self.workers.aclose()
        await self._endings.wait()


class _EnvironmentEnd(NamedTuple):
    """What is known of a worker's environment, and who ends it if the worker doesn't."""

    record: EnvironmentRecord | None
    service: EnvironmentSource | None
    endings: EnvironmentEndings

    def ensure(self, episode_id: str) -> None:
        """End it, unless the worker has said that it did."""
        if self.service is None or self.record is None:
            return
        events = self.record.events
        if not events or events[-1].what != "close" or events[-1].error:
            service = self.service
            self.endings.end(lambda: service.abandon(episode_id))


class _AttemptInProcess:
    def __init__(
        self,
        workers: WorkerProcesses,
        sessions: SessionProvider,
        workflow_task: WorkflowTask,
        open_session: OpenSession,
        ended_early: EndedEarly,
        environment_end: _EnvironmentEnd,
    ) -> None:
        self._environment_end = environment_end
        self._workers = workers
        self._sessions = sessions
        self._task = workflow_task
        self._open_session = open_session
        self._ended_early = ended_early
        self._worker = workers.take()
        self._has_answered = False

    async def result(self) -> WorkflowResult:
        worker = self._worker
        if worker.not_started:
            return WorkflowResult(failure=Failure("IsolationFault", worker.not_started), failed_in="isolation")
        reader, writer = await worker.streams()
        phase: Literal["isolation", "workflow", "judge"] = "isolation"
        raised = False
        try:
            writer.write(self._task.model_dump_json(exclude={"gym_env"}).encode() + b"\n")
            while line := await reader.readline():
                message = json.loads(line)
                if "result" in message:
                    result = WorkflowResult.from_json(message["result"])
                    self._has_answered = True
                    return result
                if "started" in message:
                    phase = "workflow"
                elif "environment" in message:
                    self._note(msgspec.convert(message["environment"], EnvironmentEvent))
                elif "judging" in message:
                    phase = "judge"
                elif "raised" in message:
                    raised = True
                    writer.write(json.dumps(self._ended_early(bool(message["explained"]))).encode() + b"\n")
                else:
                    key = await self._sessions.access(await self._open_session(message["targets"]))
                    access = {"base_url": key.base_url, "api_key": key.api_key, "control_key": key.control_key}
                    writer.write(json.dumps(access).encode() + b"\n")
        except (ConnectionError, ValueError, TypeError, LookupError, OverflowError, RecursionError, UserError) as error:
            # it died halfway, or user code wrote to the channel
            why = f"; its last message was unreadable: {error}" if not isinstance(error, ConnectionError) else ""
        else:
            why = ""
        how = await worker.ending()
        owner = {"judge": "the judge's", "workflow": "the workflow's"}.get(phase, "the")
        failure = Failure("WorkflowFault", f"{owner} process {how}{why}", worker.written())
        if phase == "judge":
            failure.kind = "JudgeFault"
        elif phase == "isolation":
            failure.kind = "IsolationFault"
        if raised:
            return WorkflowResult(failure=failure, failed_in="workflow", unjudged=failure)
        return WorkflowResult(finished=phase == "judge", failure=failure, failed_in=phase)

    @property
    def environment(self) -> EnvironmentRecord | None:
        return self._environment_end.record

    def _note(self, event: EnvironmentEvent) -> None:
        if (record := self._environment_end.record) is not None and len(record.events) <= MOST_EVENTS:
            # events are reported when they are over
            record.began = record.began or time.time() - event.started_s - event.seconds
            record.events.append(event)

    async def where(self) -> str:
        return await self._worker.stack()

    def release(self) -> None:
        self._workers.give_back(self._worker, has_answered=self._has_answered)
        if not self._worker.not_started:
            self._environment_end.ensure(self._task.episode_uuid)
