"""`ProcessVenue`: performances in worker processes of a fork server. Lives on the service loop."""

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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.episode import Failure
from ajet.schema.errors import ImportPathError, UserError
from ajet.schema.task import WorkflowTask
from ajet.task_runner.isolation.server import PACKET
from ajet.task_runner.isolation.worker import LINE_LIMIT
from ajet.task_runner.supplies import Supplies
from ajet.task_runner.venue import OpenSession, Performance
from ajet.task_runner.verdict import Verdict

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)

BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from ajet.task_runner.isolation.server import main; main(int(sys.argv[2]))"  # noqa: E501
STDERR_KEPT = 16 * 1024
"""How much of a worker's standard error is kept, from its end: a traceback and what led to it."""
EXIT_NOTICE_S = 2.0
"""How long after a worker's channel closed its exit status may take to arrive."""
DUMP_S = 0.1
"""How long a worker gets to print where it is before it is killed."""


class ForkServerProcess:
    """The server's process, from outside. Started at once; `ready` waits until the user's code is imported there."""

    def __init__(self, config: Config, base_dirs: Sequence[Path] = ()) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the process that runs the episodes; this one follows it
        )
        theirs.close()
        setup = {"config": config.model_dump(mode="json"), "base_dirs": [str(folder) for folder in base_dirs]}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # told by `ready`
            self._process.stdin.write(json.dumps(setup).encode())
            self._process.stdin.close()
        self._numbers = itertools.count(1)
        self._exits: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] | None = None

    @property
    def broke_down(self) -> bool:
        """Whether it was ready once and has ended since."""
        ready = self._ready is not None and self._ready.done() and self._ready.exception() is None
        return ready and self._process.poll() is not None

    async def ready(self) -> None:
        """Raises ImportPathError if the user's code can't be imported."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._ours.setblocking(False)
            loop.add_reader(self._ours, self._hear)
        await asyncio.shield(self._ready)

    def start(self, channel: socket.socket, stderr: int) -> int:
        """Fork a worker with these descriptors. Returns its number."""
        number = next(self._numbers)
        self._exits[number] = asyncio.get_running_loop().create_future()
        order = json.dumps({"do": "start", "number": number}).encode()
        socket.send_fds(self._ours, [order], [channel.fileno(), stderr])
        return number

    def order(self, do: str, number: int) -> None:
        """`kill` a worker and all that it started, or have it `dump` where it is."""
        closed = self._ours.fileno() < 0  # then it has ended all its workers already
        if number in self._exits and not closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then all workers are dead
                self._ours.send(json.dumps({"do": do, "number": number}).encode())

    async def exit_of(self, number: int) -> str:
        """How a worker ended, in words."""
        try:
            event = await asyncio.wait_for(asyncio.shield(self._exits[number]), EXIT_NOTICE_S)
        except TimeoutError:
            return "closed its channel"
        code = event.get("code")
        if code is None:
            return str(event.get("error"))
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def forget(self, number: int) -> None:
        """Nobody will ask about this worker any more."""
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

    def _hear(self) -> None:
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


class ProcessVenue:
    """A worker process for each episode. A crash, a hang or `os._exit` ends only the episode."""

    def __init__(self, config: Config, supplies: Supplies, base_dirs: Sequence[Path] = ()) -> None:
        self._config = config
        self._supplies = supplies
        self._base_dirs = base_dirs
        self.server = ForkServerProcess(config, base_dirs)

    async def ready(self) -> None:
        """A server that died (which kills its workers) is replaced."""
        if self.server.broke_down:
            log.warning("the fork server ended unexpectedly; starting another")
            self.server.close()
            self.server = ForkServerProcess(self._config, self._base_dirs)
        await self.server.ready()

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession) -> Performance:
        return _ProcessPerformance(self.server, self._supplies, workflow_task, open_session)

    async def aclose(self) -> None:
        self.server.close()


class _ProcessPerformance:
    def __init__(
        self, server: ForkServerProcess, supplies: Supplies, workflow_task: WorkflowTask, open_session: OpenSession
    ) -> None:
        self._server = server
        self._supplies = supplies
        self._task = workflow_task
        self._open_session = open_session
        self._channel, theirs = socket.socketpair()
        self._stderr, their_stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        self._said = bytearray()
        self._number: int | None = None
        self._not_started = ""
        try:
            self._number = server.start(theirs, their_stderr)
        except OSError as error:
            self._not_started = f"the fork server takes no orders: {error}"
        finally:
            theirs.close()
            os.close(their_stderr)
        asyncio.get_running_loop().add_reader(self._stderr, self._read_stderr)
        self._writer: asyncio.StreamWriter | None = None

    async def verdict(self) -> Verdict:
        if self._number is None:
            return Verdict(failure=Failure("IsolationFault", self._not_started), failed_in="isolation")
        reader, self._writer = await asyncio.open_connection(sock=self._channel, limit=LINE_LIMIT)
        phase = "isolation"
        try:
            self._writer.write(self._task.model_dump_json(exclude={"gym_env"}).encode() + b"\n")
            while line := await reader.readline():
                message = json.loads(line)
                if "verdict" in message:
                    return Verdict.from_json(message["verdict"])
                if "started" in message:
                    phase = "workflow"
                elif "judging" in message:
                    phase = "judge"
                else:
                    access = await self._supplies.access(await self._open_session(message["targets"]))
                    self._writer.write(json.dumps(access._asdict()).encode() + b"\n")
        except (ConnectionError, ValueError, TypeError, KeyError, UserError) as error:
            # it died in the middle, or user code wrote to the channel
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
        return Verdict(finished=phase == "judge", failure=failure, failed_in=phase)

    async def where(self) -> str:
        if self._number is None:
            return ""
        self._server.order("dump", self._number)
        await asyncio.sleep(DUMP_S)
        self._read_stderr()
        return self._tail()

    def release(self) -> None:
        if self._number is not None:
            self._server.order("kill", self._number)
            self._server.forget(self._number)
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()
        asyncio.get_running_loop().remove_reader(self._stderr)
        os.close(self._stderr)

    def _read_stderr(self) -> None:
        """Pass on what the worker wrote, and keep the end of it."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # a worker that only writes must not keep the service loop
                text = os.read(self._stderr, PACKET)
                if not text:
                    asyncio.get_running_loop().remove_reader(self._stderr)
                    return
                self._said += text
                del self._said[:-STDERR_KEPT]
                sys.stderr.write(text.decode(errors="replace"))

    def _tail(self) -> str:
        return self._said.decode(errors="replace")
