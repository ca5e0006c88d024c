"""`ProcessRunner`: attempts in worker processes, each forked from a server that has imported the user's code.

This is `wrapper_type: multi-processing`. `ForkServer` is a small process that imports the user's code once and forks a
worker for each attempt; it never imports torch, has one thread and holds no model. With `process_lifetime: run`, a
worker that has ended an attempt is given another. Model calls go through the gateway; task, reward and metadata cross
as JSON.

`serve_attempt` runs in a worker: a workflow and its judge. Its channel carries one JSON object per line. The worker
receives the task, asks for access to the model once its workflow exists, asks how the episode ended if the workflow
raised, reports when judging begins and what its environment was asked, and sends the result. A worker that stays then
says that it is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from ajet.config import Config
from ajet.environment.environment import find_source
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Failure
from ajet.schema.errors import ImportPathError, UserError
from ajet.schema.task import WorkflowTask
from ajet.schema.user_code import import_class
from ajet.system.forking import PACKET, WITH_SERVER, ForkingClient, ForkingServer
from ajet.task_judge.base_judge import JUDGE_KEY, BaseJudge, load_judge
from ajet.task_runner.attempt import AttemptHandle, EarlyEnding, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.environments import (
    EnvironmentEndings,
    LeasedSandbox,
    environment_settings,
    find_environment,
    find_sandbox,
    load_workflow,
)
from ajet.task_runner.results import describe, run_workflow
from ajet.task_runner.thread_control import end_loop, run_with_pauses, show_awaited
from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger(__name__)

LINE_LIMIT = 64 * 1024 * 1024
"""Size limit of a message between a worker and the process that runs the episodes."""
FREE = {"free": True}
"""What a worker that stays says when it has cleared up after an attempt."""
STDERR_KEPT = 16 * 1024
"""How much of the end of a worker's standard error is kept: enough for a traceback and what led to it."""
MOST_EVENTS = 10_000
"""The most environment events accepted from a worker: more than an honest one sends."""
DUMP_S = 0.1
"""How long a worker has to print its stack before it is killed."""
CLEARING_S = 2.0
"""How long a worker that stays has, after its result, to end what user code left running."""


class WorkerProcess:
    """A process of the fork server, and the descriptors that reach it."""

    def __init__(self, server: ForkingClient) -> None:
        self._server = server
        self._channel, theirs = socket.socketpair()
        self._stderr, their_stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._said = bytearray()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._number = server.start(theirs.fileno(), their_stderr)
        theirs.close()
        os.close(their_stderr)
        asyncio.get_running_loop().add_reader(self._stderr, self._read_stderr)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
        self._server.command("dump", self._number)
        await asyncio.sleep(DUMP_S)
        return self.written()

    async def ending(self) -> str:
        return await self._server.exit_of(self._number)

    def written(self) -> str:
        """The end of what it wrote to its standard error."""
        self._read_stderr()
        return self._said.decode(errors="replace")

    def end(self) -> None:
        """Kill it and everything it started."""
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

    def __init__(self, config: Config) -> None:
        self._setup = {
            "config": config.model_dump(mode="json"),
            "yaml_path": None if config.yaml_path is None else str(config.yaml_path),
        }
        self._stay = config.ajet.task_runner.process_lifetime == "run"
        self._idle: list[WorkerProcess] = []
        self._clearing: set[asyncio.Task[None]] = set()
        self._warned = False
        self._server = self._new_server()

    def _new_server(self) -> ForkingClient:
        return ForkingClient(("ajet.task_runner.processes", "ForkServer"), self._setup, ImportPathError)

    async def ready(self) -> None:
        """Replaces a server that died (its workers died with it)."""
        if self._server.died:
            log.warning("the fork server ended unexpectedly; starting another")
            self._server.close()
            self._server = self._new_server()
        await self._server.ready()

    def take(self) -> WorkerProcess:
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
        for clearing in list(self._clearing):
            clearing.cancel()
        await asyncio.gather(*self._clearing, return_exceptions=True)
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        self._server.close()


class ProcessRunner:
    """Runs attempts in processes. A crash, a hang or `os._exit` ends only that attempt."""

    def __init__(self, config: Config, sessions: SessionProvider) -> None:
        self.sessions = sessions
        self.workers = WorkerProcesses(config)
        self._world = environment_settings(config)
        self._service = find_source(self._world) if self._world is not None and self._world.url is not None else None
        """The service at which a killed worker's instances are ended. All other environments end with their process."""
        self._endings = EnvironmentEndings()

    async def ready(self) -> None:
        """The user's code is imported. Raises ImportPathError if it can't be."""
        await self.workers.ready()

    def begin(self, attempt: AttemptHandle) -> RunningAttempt:
        record = None
        if self._world is not None:
            record = EnvironmentRecord(self._world.source or self._world.url or "")
        return _AttemptInProcess(self, attempt, record)

    def ended(self, record: EnvironmentRecord | None, episode_id: str) -> None:
        """End a worker's environment, unless the worker has said that it did."""
        service, events = self._service, [] if record is None else record.events
        if service is not None and (not events or events[-1].what != "close" or events[-1].error):
            self._endings.end(lambda: service.abandon(episode_id))

    async def aclose(self) -> None:
        await self.workers.aclose()
        await self._endings.wait()


class _AttemptInProcess:
    def __init__(self, runner: ProcessRunner, attempt: AttemptHandle, environment: EnvironmentRecord | None) -> None:
        self.environment = environment
        self._runner = runner
        self._attempt = attempt
        self._worker = runner.workers.take()
        self._has_answered = False

    async def result(self) -> WorkflowResult:
        try:
            task = self._attempt.workflow_task.model_dump_json(exclude={"gym_env"}).encode()
        except ValueError as error:
            failure = Failure("TaskDataError", f"the task can't be sent to a process: {error}")
            return WorkflowResult(failure=failure, failed_in="workflow", bug=True)
        worker = self._worker
        reader, writer = await worker.streams()
        phase: Literal["isolation", "workflow", "judge"] = "isolation"
        raised, why = False, ""
        try:
            writer.write(task + b"\n")
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
                    self._attempt.on_judge()
                elif "raised" in message:
                    raised = True
                    writer.write(json.dumps(self._attempt.ended_early(bool(message["explained"]))).encode() + b"\n")
                else:
                    key = await self._runner.sessions.access(await self._attempt.open_session(message["targets"]))
                    access = {"base_url": key.base_url, "api_key": key.api_key, "control_key": key.control_key}
                    writer.write(json.dumps(access).encode() + b"\n")
        except (ConnectionError, ValueError, TypeError, LookupError, OverflowError, RecursionError, UserError) as error:
            # it died halfway, or user code wrote to the channel
            if not isinstance(error, ConnectionError):
                why = f"; its last message was unreadable: {error}"
        how = await worker.ending()
        if how == WITH_SERVER:  # through no fault of the attempt's
            phase, raised = "isolation", False
        kind, whose = {
            "isolation": ("IsolationFault", "the"),
            "workflow": ("WorkflowFault", "the workflow's"),
            "judge": ("JudgeFault", "the judge's"),
        }[phase]
        failure = Failure(kind, f"{whose} process {how}{why}", worker.written())
        if raised:
            return WorkflowResult(failure=failure, failed_in="workflow", unjudged=failure)
        return WorkflowResult(finished=phase == "judge", failure=failure, failed_in=phase)

    def _note(self, event: EnvironmentEvent) -> None:
        if (record := self.environment) is not None and len(record.events) <= MOST_EVENTS:
            # events are reported when they are over
            record.began = record.began or time.time() - event.started_s - event.seconds
            record.events.append(event)

    async def where(self) -> str:
        return await self._worker.stack()

    def release(self) -> None:
        self._runner.workers.give_back(self._worker, has_answered=self._has_answered)
        self._runner.ended(self.environment, self._attempt.workflow_task.episode_uuid)


# ------------------------------------------------------------ in the server and its workers


def _own_streams(stderr: int, attempts: list[Any]) -> None:
    """Its own stderr, also for the stack that `dump` asks for and what the attempt awaits, and no stdin."""
    os.dup2(stderr, 2)
    os.close(stderr)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable(all_threads=True)
    signal.signal(signal.SIGUSR1, lambda *_: show_awaited(attempts))
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


async def serve_attempt(server: ForkServer, channel: socket.socket) -> None:
    """Run the attempt whose task comes over the channel, and send its result."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_LIMIT)
    loop, own_thread = asyncio.get_running_loop(), threading.get_ident()

    def send(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    def tell(event: EnvironmentEvent) -> None:
        """Each event at once: this process may be killed at any time."""
        if threading.get_ident() == own_thread:
            send(environment=asdict(event))
        else:
            loop.call_soon_threadsafe(lambda: send(environment=asdict(event)))

    async def open_tuner(targets: list[str] | None) -> AjetTuner:
        send(targets=targets)
        access = json.loads(await reader.readline())
        return AjetTuner.remote(**access, config=server.config, trainable_targets=targets)

    async def ask_ending(explained: bool) -> EarlyEnding | None:
        send(raised=True, explained=explained)
        ending = json.loads(await reader.readline())
        return None if ending is None else EarlyEnding(*ending)

    workflow_task = WorkflowTask.model_validate_json(await reader.readline())
    send(started=True)
    environment = None
    if server.environments is not None:
        environment = LeasedEnvironment(server.environments, workflow_task.task, workflow_task.episode_uuid, tell)
    try:
        judge = load_judge(server.config)
    except Exception as error:  # noqa: BLE001 - the judge's constructor is user code
        result = WorkflowResult(failure=describe(error), failed_in="judge")
    else:
        retries = server.config.ajet.rollout.episode_retries
        result = await run_workflow(
            server.workflow_class,
            judge,
            workflow_task,
            open_tuner,
            judge_retries=retries,
            ask_ending=ask_ending,
            on_judge=lambda: send(judging=True),  # the judge is to blame for a crash from here on
            environment=environment,
            sandbox=None if server.sandboxes is None else LeasedSandbox(server.sandboxes, workflow_task.task.metadata),
        )
    send(result=result.to_json())
    await writer.drain()
    writer.close()


class ForkServer(ForkingServer):
    """The server, with the user's code imported."""

    descriptors = 2
    threads_warning = "importing the workflow started threads ({names}); they do not run in its workers"

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(control)
        self.config = Config.model_validate(setup["config"])
        if setup["yaml_path"] is not None:
            self.config.remember_source(Path(setup["yaml_path"]))
        self.workflow_class = load_workflow(self.config)
        judge = self.config.ajet.task_judge.judge_protocol
        if judge is not None:
            import_class(judge, BaseJudge, key=JUDGE_KEY, base_dirs=self.config.base_dirs)
        self.environments = find_environment(self.config)
        self.sandboxes = find_sandbox(self.config)
        from ajet.task_runner.tuner.clients import rehearse  # it loads the clients' libraries: nothing for the parent

        rehearse()

    def command(self, do: str, process: int) -> None:
        os.kill(process, signal.SIGUSR1)  # `dump`: faulthandler prints its stack

    def child(self, *descriptors: int) -> NoReturn:
        """Run one attempt, or, if workers stay, one after another until there are no more."""
        channel, stderr = socket.socket(fileno=descriptors[0]), descriptors[1]
        attempts: list[Any] = []
        _own_streams(stderr, attempts)
        while channel.recv(1, socket.MSG_PEEK):
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            attempts[:] = [serve_attempt(self, channel.dup())]
            try:
                run_with_pauses(loop, attempts[0])
            finally:
                end_loop(loop)
            sys.stdout.flush()
            sys.stderr.flush()
            if self.config.ajet.task_runner.process_lifetime == "episode":
                break
            channel.setblocking(True)
            channel.sendall(json.dumps(FREE).encode() + b"\n")
        os._exit(0)  # skip the server's exit handlers, and don't wait for threads that user code left
