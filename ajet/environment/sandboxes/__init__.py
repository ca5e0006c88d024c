"""`Sandbox`: a confined place in which one episode runs commands and keeps files. Each kind has its module.

`open_sandbox` opens one of the kind that the settings name, on the sandboxes' thread; `fresh_copy` makes one with an
agent's result, and `of_task` says what a task changes of the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from tempfile import SpooledTemporaryFile
from typing import IO, Any, TypeVar

from ajet.config.kinds import SANDBOXES, load
from ajet.environment.sandboxes.sandbox import (
    Command,
    Confined,
    ExecResult,
    Input,
    OnOutput,
    SandboxError,
    SandboxSettings,
)
from ajet.schema.errors import EpisodeFault, TaskDataError

__all__ = [
    "ExecResult",
    "Input",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "UnusableResultError",
    "check_sandbox",
    "fresh_copy",
    "fresh_sandbox",
    "of_task",
    "open_sandbox",
]

T = TypeVar("T")


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
"""That of the sandboxes' thread, once one has been opened."""


def _after_fork() -> None:
    """A fork has the loop, but not the thread."""
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


def _submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on the sandboxes' thread."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ajet-sandboxes", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


async def on_host(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which runs on the sandboxes' thread. Cancelling it cancels the work."""
    return await asyncio.wrap_future(_submit(work))


def run_on_host(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Wait for `work`, which runs on the sandboxes' thread, from any other one. Raises TimeoutError, and cancels it."""
    running = _submit(work)
    try:
        return running.result(seconds)
    except TimeoutError:
        running.cancel()
        raise


class Sandbox:
    """A sandbox, in front of its kind's, which lives on the sandboxes' thread. Can be used from any event loop. An
    async context manager that closes it."""

    def __init__(self, inner: Confined) -> None:
        """`inner` has started."""
        self._inner = inner
        self.workspace = inner.workspace
        """The folder, as seen inside, where commands start and relative paths begin."""
        self.gateway_url = inner.gateway_url
        """The run's gateway as it is reached from inside (`network: gateway`)."""
        self.settings = inner.settings
        """How it is confined: what another one like it is made of."""
        self.limits = inner.limits
        """What holds each limit: `memory: cgroup`, `processes: prlimit`, … or `not limited`."""

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | Input = b"",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a shell line, or an argument vector without a shell. Cancelling it ends the command and its children.
        Raises ValueError for what can't be a command."""
        relay = None if on_output is None else _Relay(on_output)
        take = None if relay is None else relay.take
        running = _submit(self._inner.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, on_output=take))
        if relay is not None:
            relay.stop = running.cancel
        try:
            result = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if relay is None or relay.failure is None:
                raise
            raise relay.failure from None
        if relay is not None and relay.failure is not None:  # the command had ended before its output was taken
            raise relay.failure
        return result

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError, IsADirectoryError, PermissionError or another OSError."""
        return await on_host(self._inner.read(path))

    async def write(self, path: str, content: bytes) -> None:
        """Create or replace a file, whole or not at all; its folders are made. Raises OSError."""
        await on_host(self._inner.write(path, content))

    async def end_processes(self) -> None:
        """End what commands have left running. The files stay."""
        await on_host(self._inner.end_processes())

    async def close(self) -> None:
        """End all processes and remove all files. Calling it again does nothing."""
        # shielded: an episode that is cancelled while it closes its sandbox must not leave it
        await asyncio.shield(asyncio.wrap_future(_submit(self._inner.close())))

    def kill(self) -> None:
        """`close`, from any thread, and without an event loop. May take a moment."""
        self._inner.kill()

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Relay:
    """Calls the caller's function on the caller's event loop."""

    def __init__(self, on_output: OnOutput) -> None:
        self.failure: Exception | None = None
        self.stop: Callable[[], object] = lambda: None
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()

    def take(self, chunk: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, chunk)

    def _deliver(self, chunk: bytes) -> None:
        if self.failure is not None:
            return
        try:
            self._on_output(chunk)
        except Exception as error:  # noqa: BLE001 - the caller's function: raised where the command is awaited
            self.failure = error
            self.stop()


class open_sandbox:
    """`sandbox = await open_sandbox(settings)`, or `async with open_sandbox(settings) as sandbox`.

    `gateway_url`: the run's gateway, for `network: gateway`. Raises `SandboxError` that says what is missing.
    """

    def __init__(self, settings: SandboxSettings | None = None, gateway_url: str | None = None) -> None:
        self._settings = settings or SandboxSettings()
        self._gateway_url = gateway_url
        self._sandbox: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._open().__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._open()
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _open(self) -> Sandbox:
        sandbox = load(SANDBOXES, self._settings.kind)(self._settings, self._gateway_url)
        try:
            await on_host(sandbox.start())
        except asyncio.CancelledError:
            _submit(sandbox.close())  # it may have been ready before anybody here could take it
            raise
        return Sandbox(sandbox)


def check_sandbox(settings: SandboxSettings) -> None:
    """Raises `SandboxError` if no such sandbox can be made on this machine: before a run, not in its first episode."""
    load(SANDBOXES, settings.kind).check(settings)


TASK_SANDBOX = "sandbox"
"""The key of a task's metadata that changes its episodes' sandbox."""
_OF_TASK = ("cpus", "disk_mb", "environment", "exec_seconds", "image", "memory_mb", "processes", "workspace")


def of_task(settings: SandboxSettings, metadata: Mapping[str, Any]) -> SandboxSettings:
    """The settings for a task: it may have another image, folder and size, but can't open what confines it."""
    changes = metadata.get(TASK_SANDBOX)
    if changes is None:
        return settings
    if not isinstance(changes, Mapping) or (unknown := [key for key in changes if key not in _OF_TASK]):
        found = f"{unknown[0]!r}" if isinstance(changes, Mapping) else f"{changes!r:.100}"
        raise TaskDataError(f"a task's `{TASK_SANDBOX}` may have {', '.join(_OF_TASK)}, not {found}")
    try:
        return replace(settings, **changes)
    except (SandboxError, TypeError, AttributeError) as error:
        raise TaskDataError(f"a task's `{TASK_SANDBOX}`: {error}") from None


MOST_BYTES = 512 << 20
"""As much as a task's folder may bring."""
MOST_ENTRIES = 50_000
LONGEST_PATH = 1000
IN_MEMORY = 16 << 20
"""What is larger waits in a temporary file."""
_LIST = "exec tar -cf - . 2>/dev/null"
_TAR_CODES = (0, 1, 2)
"""2: something could not be read, and was left out."""


class UnusableResultError(EpisodeFault):
    """What the agent left can't be judged, through its own doing. The judge that meets it gives the reward 0."""


@dataclass(frozen=True, slots=True)
class Result:
    """An agent's files, as an archive of regular files."""

    packed: bytes

    @classmethod
    async def of(cls, sandbox: Sandbox, without: Collection[str] = ()) -> Result:
        """Take over the files. `without`: paths in the workspace that stay behind, whatever is found in their place.
        Raises UnusableResultError, or SandboxError if the sandbox has died."""
        await sandbox.end_processes()
        with SpooledTemporaryFile(IN_MEMORY) as archive:

            def take(piece: bytes) -> None:
                if archive.tell() + len(piece) > MOST_BYTES:
                    raise UnusableResultError(f"the agent's files are larger than {MOST_BYTES >> 20} MB")
                archive.write(piece)

            ran = await sandbox.exec(["/bin/sh", "-c", _LIST], on_output=take)
            if ran.timed_out or ran.exit_code not in _TAR_CODES:
                raise UnusableResultError(f"the agent's files can't be listed ({_ended(ran)})")
            archive.seek(0)
            top = sandbox.workspace
            left_behind = [posixpath.relpath(posixpath.join(top, path), top) for path in without]
            return cls(await asyncio.to_thread(_regular_files, archive, left_behind))

    async def put(self, sandbox: Sandbox) -> None:
        """Write the files into a fresh sandbox's workspace. Raises UnusableResultError."""
        ran = await sandbox.exec(["tar", "-xf", "-"], stdin=self.packed)
        if ran.timed_out or ran.exit_code:
            said = ran.stderr.decode(errors="replace").strip()[-500:]
            raise UnusableResultError(f"the agent's files can't be copied ({_ended(ran)}): {said}")


@contextlib.asynccontextmanager
async def fresh_sandbox(like: Sandbox, **changes: Any) -> AsyncIterator[Sandbox]:
    """A new, empty sandbox with the same limits, but for the `changes`, and no way to the model."""
    network = "none" if like.settings.network == "gateway" else like.settings.network
    async with open_sandbox(replace(like.settings, network=network, **changes)) as sandbox:
        yield sandbox


@contextlib.asynccontextmanager
async def fresh_copy(sandbox: Sandbox, without: Collection[str] = ()) -> AsyncIterator[Sandbox]:
    """A new sandbox that holds the agent's files, and nothing else of it: see `Result.of`."""
    result = await Result.of(sandbox, without)
    async with fresh_sandbox(sandbox) as copy:
        await result.put(copy)
        yield copy


def _regular_files(archive: IO[bytes], left_behind: Sequence[str]) -> bytes:
    """What may be taken over of an archive that was made in the agent's sandbox: nothing in it is to be trusted."""
    kept = io.BytesIO()
    now, total = int(time.time()), 0
    regular: dict[str, tarfile.TarInfo] = {}
    try:
        with tarfile.open(fileobj=archive, mode="r:") as given, tarfile.open(fileobj=kept, mode="w") as taken:
            for count, member in enumerate(given):
                name = posixpath.normpath(member.name)
                if count > MOST_ENTRIES:
                    raise UnusableResultError(f"the agent left more than {MOST_ENTRIES} files and folders")
                if len(name) > LONGEST_PATH:
                    raise UnusableResultError(f"the agent left a path of more than {LONGEST_PATH} characters")
                if member.isreg():
                    regular[member.name] = member
                file = regular.get(member.linkname if member.islnk() else member.name)  # a file may have several names
                if file is None or name.startswith(("/", "..")) or any(_meet(name, path) for path in left_behind):
                    continue
                total += file.size  # of a sparse file, what it would become
                if total > MOST_BYTES:
                    raise UnusableResultError(f"the agent's files are larger than {MOST_BYTES >> 20} MB")
                plain = tarfile.TarInfo(name)
                plain.size, plain.mtime = file.size, min(max(int(file.mtime), 0), now)
                plain.mode = 0o755 if file.mode & 0o100 else 0o644
                taken.addfile(plain, given.extractfile(file))
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError) as error:
        raise UnusableResultError(f"the agent's files can't be read: {error}") from None
    return kept.getvalue()


def _meet(name: str, path: str) -> bool:
    """Whether a file would be in another's place, or one of them in a folder of the other's name."""
    return name == path or name.startswith(f"{path}/") or path.startswith(f"{name}/")


def _ended(ran: ExecResult) -> str:
    return "it took too long" if ran.timed_out else f"exit code {ran.exit_code}"
