"""`ProcessRunner`: attempts in worker processes, each forked from a server that has imported the user's code.

This is `wrapper_type: multi-processing`. `fork_server.py` is a small process that imports the user's code once and
forks a worker for each attempt; it never imports torch, has one thread and holds no model. `worker.py` is what a worker
does. Model calls go through the gateway; task, reward and metadata cross as JSON.
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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import msgspec

from ajet.environment.environment import EnvironmentSource, find_source
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Failure
from ajet.schema.errors import ImportPathError, UserError
from ajet.schema.task import WorkflowTask
from ajet.system.forking import PACKET, kill_all, reseed
from ajet.system.processes import adopt_orphans, children, kill_below
from ajet.task_runner.attempt import EndedEarly, OpenSession, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.environments import EnvironmentEndings, environment_settings
from ajet.task_runner.worker import LINE_LIMIT

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


class ProcessRunner:
    """Runs each attempt in its own process. A crash, a hang or `os._exit` ends only that attempt."""

    def __init__(self, config: Config, sessions: SessionProvider, base_dirs: Sequence[Path] = ()) -> None:
        self._config = config
        self._sessions = sessions
        self._base_dirs = base_dirs
        self.server = ForkServerClient(config, base_dirs)
        self._world = environment_settings(config)
        self._service = find_source(self._world) if self._world is not None and self._world.url is not None else None
        """The service at which a killed worker's instances are ended. All other environments end with their process."""
        self._endings = EnvironmentEndings()

    async def ready(self) -> None:
        """Replaces a server that died (its workers died with it)."""
        if self.server.died:
            log.warning("the fork server ended unexpectedly; starting another")
            self.server.close()
            self.server = ForkServerClient(self._config, self._base_dirs)
        await self.server.ready()

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession, ended_early: EndedEarly) -> RunningAttempt:
        record = None
        if self._world is not None:
            record = EnvironmentRecord(self._world.source or self._world.url or "")
        end = _EnvironmentEnd(record, self._service, self._endings)
        return _AttemptInProcess(self.server, self._sessions, workflow_task, open_session, ended_early, end)

    async def aclose(self) -> None:
        self.server.close()
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
        server: ForkServerClient,
        sessions: SessionProvider,
        workflow_task: WorkflowTask,
        open_session: OpenSession,
        ended_early: EndedEarly,
        environment_end: _EnvironmentEnd,
    ) -> None:
        self._environment_end = environment_end
        self._server = server
        self._sessions = sessions
        self._task = workflow_task
        self._open_session = open_session
        self._ended_early = ended_early
        self._channel, theirs = socket.socketpair()
        self._stderr, their_stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._said = bytearray()
        self._number: int | None = None
        self._not_started = ""
        try:
            self._number = server.start(theirs, their_stderr)
        except OSError as error:
            self._not_started = f"the fork server can't be reached: {error}"
        finally:
            theirs.close()
            os.close(their_stderr)
        asyncio.get_running_loop().add_reader(self._stderr, self._read_stderr)
        self._writer: asyncio.StreamWriter | None = None

    async def result(self) -> WorkflowResult:
        if self._number is None:
            return WorkflowResult(failure=Failure("IsolationFault", self._not_started), failed_in="isolation")
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=LINE_LIMIT)
        phase: Literal["isolation", "workflow", "judge"] = "isolation"
        raised = False
        try:
            self._writer.write(self._task.model_dump_json(exclude={"gym_env"}).encode() + b"\n")
            while line := await reader.readline():
                message = json.loads(line)
                if "result" in message:
                    return WorkflowResult.from_json(message["result"])
                if "started" in message:
                    phase = "workflow"
                elif "environment" in message:
                    self._note(msgspec.convert(message["environment"], EnvironmentEvent))
                elif "judging" in message:
                    phase = "judge"
                elif "raised" in message:
                    raised = True
                    self._writer.write(json.dumps(self._ended_early(bool(message["explained"]))).encode() + b"\n")
                else:
                    key = await self._sessions.access(await self._open_session(message["targets"]))
                    access = {"base_url": key.base_url, "api_key": key.api_key, "control_key": key.control_key}
                    self._writer.write(json.dumps(access).encode() + b"\n")
        except (ConnectionError, ValueError, TypeError, LookupError, OverflowError, RecursionError, UserError) as error:
            # it died halfway, or user code wrote to the channel
            why = f"; its last message was unreadable: {error}" if not isinstance(error, ConnectionError) else ""
        else:
            why = ""
        how = await self._server.exit_of(self._number)
        self._read_stderr()
        owner = {"judge": "the judge's", "workflow": "the workflow's"}.get(phase, "the")
        failure = Failure("WorkflowFault", f"{owner} process {how}{why}", self._tail())
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
        if self._number is None:
            return ""
        self._server.command("dump", self._number)
        await asyncio.sleep(DUMP_S)
        self._read_stderr()
        return self._tail()

    def release(self) -> None:
        if self._number is not None:
            self._server.command("kill", self._number)
            self._server.forget(self._number)
            self._environment_end.ensure(self._task.episode_uuid)
        if self._writer is not None:
            self._writer.close()
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

    def _tail(self) -> str:
        return self._said.decode(errors="replace")


STOPPING = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """A worker that has ended."""

    number: int
    code: int
    """Its exit code; negative: the signal that killed it."""


class ForkedWorkers:
    """`body` is what a worker does: it gets the worker's number and the runner's process id, and returns the exit
    code. What a worker leaves behind is killed, and so is whatever else this process starts from now on."""

    def __init__(self, body: Callable[[int, int], int]) -> None:
        adopt_orphans()
        self._others = children()
        self._body = body
        self._numbers: dict[int, int] = {}
        """Process id → number."""
        self._stopped = False

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self, number: int) -> None:
        """Fork a worker, unless `stop` was called."""
        sys.stdout.flush()
        sys.stderr.flush()
        runner = os.getpid()
        # a signal that came between the fork and the worker's own handlers would run the runner's handlers there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            if self._stopped:
                return
            process = os.fork()
            if process == 0:
                self._become_worker(number, runner)
            self._numbers[process] = number
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Ask all workers to finish what they have begun. No other one starts."""
        self._stopped = True
        for process in list(self._numbers):
            os.kill(process, signal.SIGTERM)

    def wait(self) -> Ended:
        """Wait until a worker ends."""
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert found is not None
            number = self._numbers.get(found.si_pid)
            if number is not None:
                kill_all(found.si_pid)  # before it is reaped: until then, its process id isn't reused
            kill_below(keep={*self._numbers, *self._others})
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                _, status = os.waitpid(found.si_pid, 0)
                self._numbers.pop(found.si_pid, None)
                self._others.discard(found.si_pid)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if number is not None:
                return Ended(number, os.waitstatus_to_exitcode(status))

    def _become_worker(self, number: int, runner: int) -> NoReturn:
        code = 1
        try:
            adopt_orphans()
            os.setsid()  # Ctrl-C on the terminal reaches the runner alone, and all that a worker starts can be killed
            for stopping in STOPPING:
                signal.signal(stopping, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            reseed()
            code = self._body(number, runner)
        except BaseException:  # noqa: BLE001 - a worker must never return to the runner's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
