"""`Instances`: the processes of a server's environments, from the server's side: started, asked, watched and ended.

Each instance has a process of its own, forked from a clean one (`InstanceServer`, see `ajet.system.forking`), which
imports the user's class once and never creates an environment itself. An instance's process has one environment, and
receives requests over a socket, one JSON object per line. One that takes too long, or isn't asked for too long, is
killed with all that it started. `Instances` lives on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ajet.environment.environment import (
    EnvironmentSettings,
    EnvironmentSource,
    action_message,
    find_source,
    observation_messages,
    observed,
)
from ajet.environment.gymnasium_environment import plain_value
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.printable import encodable_values
from ajet.schema.task import Task
from ajet.system.forking import ForkingClient, ForkingServer

LINE_LIMIT = 64 * 1024 * 1024
TRACEBACK_CHARS = 8000
REMEMBERED = 10_000
"""How many ended instances are remembered, for telling their clients why."""
SWEEP_S = 0.5
CLOSE_S = 5.0
"""How long an environment's `close` may take."""


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """What a server allows its environments."""

    instances: int = 8
    """Most at a time."""
    idle_s: float = 1800.0
    """An instance that isn't asked for this long expires."""
    step_s: float = 300.0
    """One request to an environment."""
    memory_bytes: int = 4 * 1024**3
    """The memory limit of each process. 0: no limit."""


@dataclass(slots=True)
class InstanceCounts:
    """What has happened since the server started."""

    created: int = 0
    released: int = 0
    expired: int = 0
    died: int = 0
    refused: int = 0


class InstanceError(Exception):
    """Why a request isn't answered, with the status that says so over HTTP: 400 for an instance that never was, 409
    for one that is there already, 410 for one that has ended, 503 if all places are taken, 500 with the traceback of
    an environment that raised."""

    def __init__(self, status: int, message: str, *, by_action: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.by_action = by_action
        """What an instance that has ended was asked last may have caused its end."""


class _End(NamedTuple):
    why: str
    by_action: bool


@dataclass(slots=True)
class _Instance:
    """One process."""

    server: ForkingClient
    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float
    name: str = ""
    """Its id, for clients; none for one that answers a question about tasks."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One request at a time."""
    ended: _End | None = None


class Instances:
    """All the instances of a server."""

    def __init__(self, settings: EnvironmentSettings, limits: InstanceLimits, base_dirs: Sequence[Path] = ()) -> None:
        self.limits = limits
        self.counts = InstanceCounts()
        self._setup = {
            "settings": asdict(settings),
            "base_dirs": [str(folder) for folder in base_dirs],
            "memory_bytes": limits.memory_bytes,
        }
        self._open: dict[str, _Instance] = {}
        self._starting: set[str] = set()
        self._gone: OrderedDict[str, _End] = OrderedDict()
        self._server: ForkingClient | None = None
        """The clean process."""
        self._sweeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> int:
        """How many instances there are."""
        return len(self._open) + len(self._starting)

    async def start(self) -> str:
        """Start the clean process. Returns the environment's name; raises a `UserError` if it can't be used."""
        name: str = (await (await self._clean_process()).ready())["name"]
        self._sweeper = asyncio.create_task(self._sweep())
        return name

    async def aclose(self) -> None:
        """End everything. Environments get the time to close, those that were released before included."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for instance_id in list(self._open):
            await self.release(instance_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._server is not None:
            self._server.close()

    # ------------------------------------------------------------ what clients ask

    async def task_ids(self, split: str) -> list[str]:
        """The tasks of a split, asked in a process of its own: it is the user's code."""
        instance = await self._start_instance()
        try:
            answer: list[str] = await self._ask(instance, {"do": "task_ids", "split": split})
            return answer
        finally:
            self._kill(instance)

    async def create(self, instance_id: str, task: dict[str, Any]) -> Any:
        """Start an instance and begin a task in it."""
        if instance_id in self._open or instance_id in self._starting:
            raise InstanceError(409, f"there is an instance {instance_id!r} already")
        if self.running >= self.limits.instances:
            self.counts.refused += 1
            raise InstanceError(503, f"all {self.limits.instances} environments are in use")
        self._starting.add(instance_id)
        try:
            instance = await self._start_instance()
            if instance_id not in self._starting:
                self._kill(instance)
                raise InstanceError(410, f"instance {instance_id!r} was released before it had started")
            instance.name = instance_id
            self._open[instance_id] = instance
        finally:
            self._starting.discard(instance_id)
        self._gone.pop(instance_id, None)
        self.counts.created += 1
        try:
            return await self._ask(instance, {"do": "create", "instance_id": instance_id, "task": task})
        except BaseException:
            self._end(instance, "it could not begin its task")
            raise

    async def ask(self, instance_id: str, request: dict[str, Any]) -> Any:
        """The environment's answer. Raises InstanceError."""
        instance = self._open.get(instance_id)
        if instance is None:
            end = self._gone.get(instance_id)
            if end is None:
                raise InstanceError(400, f"there is no instance {instance_id!r}")
            raise InstanceError(410, f"instance {instance_id!r} has ended: {end.why}", by_action=end.by_action)
        return await self._ask(instance, request)

    async def release(self, instance_id: str) -> bool:
        """End an instance in order. False if there never was one; one that has ended by itself needs no release."""
        if instance_id in self._starting:
            self._starting.discard(instance_id)  # `create` sees it
            return True
        instance = self._open.pop(instance_id, None)
        if instance is None:
            return instance_id in self._gone
        self.counts.released += 1
        self._remember(instance_id, "it was released")
        if instance.turn.locked():  # it is in the middle of something that nobody waits for any more
            self._kill(instance)
            return True
        self._in_background(self._close(instance))
        return True

    # ------------------------------------------------------------ one request

    async def _ask(self, instance: _Instance, request: dict[str, Any]) -> Any:
        """Goes on if the client leaves: the answer must be read by someone."""
        task = self._in_background(self._exchange(instance, request))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        return await asyncio.shield(task)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _exchange(self, instance: _Instance, request: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        acted = request["do"] == "step"
        async with instance.turn:
            if instance.ended is not None:
                raise InstanceError(410, instance.ended.why, by_action=instance.ended.by_action)
            instance.used_at = loop.time()
            try:
                instance.writer.write(json.dumps(request).encode() + b"\n")
                async with asyncio.timeout(self.limits.step_s):
                    line = await instance.reader.readline()
            except TimeoutError:
                why = f"its `{request['do']}` took longer than {self.limits.step_s:g} s"
                self._end(instance, why, by_action=acted)
                raise InstanceError(410, why, by_action=acted) from None
            except (ConnectionError, ValueError) as error:  # ValueError: a line that is too long
                line = b"" if isinstance(error, ConnectionError) else b"?"
            answer = _parsed(line)
            if answer is None:
                how = "wrote something unreadable to its channel"
                if not line:
                    how = await instance.server.exit_of(instance.number)
                by_action = acted and (how.startswith("exited") or ("killed by" in how and "SIGKILL" not in how))
                why = f"its process {how} during `{request['do']}`"
                self._end(instance, why, by_action=by_action)
                raise InstanceError(410, why, by_action=by_action)
            instance.used_at = loop.time()
            if "error" in answer:
                raise InstanceError(500, answer["error"])
            return answer.get("data")

    # ------------------------------------------------------------ ends

    def _end(self, instance: _Instance, why: str, *, by_action: bool = False) -> None:
        if self._open.get(instance.name) is instance:  # and not a later one with the same id
            del self._open[instance.name]
        if instance.ended is not None:
            return
        instance.ended = _End(why, by_action)
        if instance.name:
            self.counts.died += 1
            self._remember(instance.name, why, by_action)
        self._kill(instance)

    def _remember(self, instance_id: str, why: str, by_action: bool = False) -> None:
        self._gone[instance_id] = _End(why, by_action)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _kill(self, instance: _Instance) -> None:
        instance.ended = instance.ended or _End("it was ended", False)
        instance.server.command("kill", instance.number)
        instance.server.forget(instance.number)
        instance.writer.close()

    async def _close(self, instance: _Instance) -> None:
        """Let the environment close itself, then make sure that it has ended."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                instance.writer.write(b'{"do": "close"}\n')
                await instance.reader.read()
        self._kill(instance)

    async def _sweep(self) -> None:
        """End what is idle for too long, and notice what has died by itself."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = asyncio.get_running_loop().time()
            for instance in list(self._open.values()):
                if instance.turn.locked():
                    continue
                if instance.reader.at_eof():
                    self._end(instance, f"its process {await instance.server.exit_of(instance.number)}")
                elif now - instance.used_at > self.limits.idle_s:
                    self.counts.expired += 1
                    self.counts.died -= 1  # `_end` counts it as well
                    self._end(instance, f"it was not used for {self.limits.idle_s:g} s")

    # ------------------------------------------------------------ the clean process

    async def _clean_process(self) -> ForkingClient:
        """The process that has imported the environment; a new one if the last has died. Raises a `UserError`."""
        if self._server is not None and self._server.died:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkingClient((__name__, "InstanceServer"), self._setup)
        await self._server.ready()
        return self._server

    async def _start_instance(self) -> _Instance:
        server = await self._clean_process()
        ours, theirs = socket.socketpair()
        with theirs:
            number = server.start(theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        return _Instance(server, number, reader, writer, asyncio.get_running_loop().time())


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line from an instance; None if it is not an answer. User code may have written to the channel."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and line.endswith(b"\n") else None


# ---------------------------------------------------------------- the clean process, and an instance's


def serve_instance(source: EnvironmentSource, channel: socket.socket) -> None:
    """Answer requests until `close` or the end of the channel."""
    lease: LeasedEnvironment | None = None
    try:
        for line in _lines(channel):
            request = json.loads(line)
            if request["do"] == "close":
                return
            if request["do"] == "task_ids":
                answer = _answered(lambda: source.task_ids(request["split"]))  # noqa: B023 - called at once
            elif request["do"] == "create":
                lease = LeasedEnvironment(source, Task.model_validate(request["task"]), request["instance_id"])
                answer = _answered(lambda: _created(lease, request))  # noqa: B023
            else:
                assert lease is not None
                answer = _answered(lambda: _asked(lease, request))  # noqa: B023
            channel.sendall(answer)
    except ConnectionError:
        return  # the server has ended this instance, or itself
    finally:
        if lease is not None:
            lease.close()
        channel.close()


def _lines(channel: socket.socket) -> Iterator[bytes]:
    with channel.makefile("rb") as file:
        yield from file


def _created(lease: LeasedEnvironment, request: dict[str, Any]) -> dict[str, Any]:
    lease.open()
    info: dict[str, Any] = {"instance_id": lease.episode_uuid, "task_id": request["task"]["task_id"]}
    if lease.tools:
        info["tools"] = list(lease.tools)
    return {"state": observation_messages(observed(lease.observation)), "info": info}


def _asked(lease: LeasedEnvironment, request: dict[str, Any]) -> Any:
    if request["do"] == "step":
        observation, reward, done, info = lease.step(action_message(request["action"]))
        state = observation_messages(observed(observation))
        return {"state": state, "reward": reward, "is_terminated": done, "info": info}
    if request["do"] == "evaluate":
        return lease.evaluate(params=request["params"])
    return lease.info()


def _answered(work: Callable[[], Any]) -> bytes:
    """The line that answers a request: `data`, or an error. An exception of the environment, or an answer of it that
    has no JSON form, fails only its request."""
    try:
        answer = json.dumps({"data": work()}, default=plain_value)
    except Exception:  # noqa: BLE001 - user code may raise anything; the client is told
        answer = json.dumps({"error": traceback.format_exc()[-TRACEBACK_CHARS:]})
    return json.dumps(encodable_values(json.loads(answer))).encode() + b"\n"


class InstanceServer(ForkingServer):
    """The server, with the user's code imported."""

    descriptors = 1
    threads_warning = "importing the environment started threads ({names}); its instances lack them"

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(control)
        self._source = find_source(EnvironmentSettings(**setup["settings"]), [Path(d) for d in setup["base_dirs"]])
        self._memory: int = setup["memory_bytes"]

    def facts(self) -> dict[str, Any]:
        return {"name": self._source.name}

    def child(self, *descriptors: int) -> int:
        try:
            if self._memory:
                resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
            serve_instance(self._source, socket.socket(fileno=descriptors[0]))
            return 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
