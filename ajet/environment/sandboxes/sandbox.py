"""`Confined`: a sandbox of one kind, with its settings, the streams of its commands, and their results.

Code that a model wrote runs in a sandbox and nowhere else. It belongs to one episode, and closing it ends every process
in it and removes its files. What a command does wrong (exit code, time limit, too much output) is an `ExecResult`; only
a sandbox that itself fails raises `SandboxError`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from ajet.config.kinds import SANDBOXES
from ajet.schema.errors import UserError

Command = str | Sequence[str]

WORKSPACE = "/workspace"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where commands are looked for, whatever image they run in."""
FIRST_UID, UIDS = 0x6A000000, 0x01000000
"""Users that exist nowhere else: one for each sandbox, so that its processes are counted apart from all others."""
NO_FOLDER = ("/", "/proc", "/sys", "/dev", "/tmp")
"""Where no other file system can be put."""
SHARED_MEMORY_MB = 64
"""What /dev/shm may hold."""
Network = Literal["none", "gateway", "host"]


class SandboxError(UserError):
    """A sandbox that can't be made as asked, or that died."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How an episode is confined. Limits hold for the sandbox as a whole, not for each command."""

    kind: str = "bubblewrap"
    network: Network = "none"
    """`gateway`: the run's own gateway can be reached and nothing else."""
    cpus: float = 1.0
    memory_mb: int = 1024
    """The limit for all processes together. Files also take memory: see `memory_with_files_mb`."""
    processes: int = 128
    disk_mb: int = 512
    """What files may take in the workspace, and again in /tmp."""
    exec_seconds: float = 60.0
    """The longest that one command may run."""
    lifetime_seconds: float = 3600.0
    output_bytes: int = 1_000_000
    """The most that is kept of each output stream of a command."""
    image: str | None = None
    """Docker, Podman, Kubernetes: the image of the root file system."""
    workspace: str = WORKSPACE
    """Where commands start. If another is named, a container's begins with the files that the image has there."""
    folders: tuple[str, ...] = ()
    """Further folders that are empty at the start and writable, each of `disk_mb`."""
    read_only: tuple[str, ...] = ()
    """Folders of this machine that can also be seen, but not changed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All variables that commands see, besides PATH, HOME and LANG: nothing is inherited."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What one kind alone understands (Kubernetes: namespace, node selector, …)."""

    def __post_init__(self) -> None:
        if self.kind not in SANDBOXES:
            raise SandboxError(f"sandbox kind {self.kind!r}: expected one of {', '.join(SANDBOXES)}")
        if self.network not in get_args(Network):
            raise SandboxError(f"sandbox network {self.network!r}: expected one of {', '.join(get_args(Network))}")
        least = {"memory_mb": 16, "processes": 4, "disk_mb": 1, "output_bytes": 1, "cpus": 0.01}
        for name in ("cpus", "memory_mb", "processes", "disk_mb", "exec_seconds", "lifetime_seconds", "output_bytes"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0 or value < least.get(name, 0):
                raise SandboxError(f"sandbox {name}: {value} is too little; expected {least.get(name, 'more than 0')}")
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise SandboxError(f"sandbox environment: {name!r} can't be a variable")
        for folder in self.read_only:
            if not os.path.isabs(folder) or os.path.normpath(folder) in ("/", "/proc", "/sys", "/dev", self.workspace):
                raise SandboxError(f"sandbox read_only: {folder!r} can't be shown: name an absolute path of a folder")
        for folder in self.writable:
            if not os.path.isabs(folder) or os.path.normpath(folder) != folder or folder in NO_FOLDER or ":" in folder:
                raise SandboxError(f"sandbox workspace: {folder!r} can't be one: name an absolute path such as /app")

    @property
    def memory_with_files_mb(self) -> int:
        """The memory of processes and of full file systems together: files can't take what processes need."""
        return self.memory_mb + (1 + len(self.writable)) * self.disk_mb + SHARED_MEMORY_MB

    @property
    def writable(self) -> tuple[str, ...]:
        """The workspace, and the further folders."""
        return (self.workspace, *self.folders)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did."""

    exit_code: int
    """The exit code as a shell reports it; 124 if the time limit ended it, 137 if the memory limit did."""
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False
    """Some output was dropped: it was longer than `output_bytes`."""


OnOutput = Callable[[bytes], None]

CHUNK = 1 << 16
PIECE = 1 << 15
"""The largest part of a written file that goes into one message to a pod."""
DRAIN = 1 << 22
"""How much is still read once the command has ended: more than a pipe holds, but not what others print for ever."""


class Kept:
    """What is kept of a stream that arrives in pieces."""

    def __init__(self, limit: int, on_output: OnOutput | None = None) -> None:
        """`on_output` may not raise."""
        self._on_output = on_output
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    @property
    def truncated(self) -> bool:
        """Whether something was left out."""
        return self._left_out > 0

    def content(self) -> bytes:
        """What was kept."""
        if not self._left_out:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % self._left_out + bytes(self._tail)

    def add(self, chunk: bytes) -> None:
        """The next piece."""
        if self._on_output is not None:
            self._on_output(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > self._tail_limit:
            over = len(self._tail) - self._tail_limit
            del self._tail[:over]
            self._left_out += over


class Output(Kept):
    """One output stream that comes through a descriptor. Owns it."""

    def __init__(self, descriptor: int, limit: int, on_output: OnOutput | None = None) -> None:
        super().__init__(limit, on_output)
        self._closed = False
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def finish(self) -> None:
        """The command has ended: take what the pipe still holds, and close it."""
        left = DRAIN
        while not self._closed and left > 0 and (count := self._read()):
            left -= count
        self.close()

    def close(self) -> None:
        """Read no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _read(self) -> int:
        """Returns how much there was."""
        try:
            chunk = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other end has closed
            chunk = b""
        if not chunk:
            self.close()
            return 0
        self.add(chunk)
        return len(chunk)


class Input:
    """What a command reads, written while it runs. Written from any thread, read by one command."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._wake: Callable[[], object] = lambda: None

    def write(self, piece: bytes) -> None:
        """Add a piece."""
        self._pieces.append(piece)
        self._wake()

    def close(self) -> None:
        """The command reads an end of file after what has been written."""
        self.write(b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Every piece, as soon as it is there, until it is closed."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(news.set)
        while True:
            while self._pieces:
                if not (piece := self._pieces.popleft()):
                    return
                yield piece
            await news.wait()
            news.clear()


async def pieces_of(content: bytes | Input) -> AsyncIterator[memoryview]:
    """A command's input in pieces that a pipe takes."""
    if isinstance(content, Input):
        async for piece in content.pieces():
            yield memoryview(piece)
        return
    view = memoryview(content)
    for at in range(0, len(view), PIECE):
        yield view[at : at + PIECE]


async def feed(descriptor: int, content: bytes | Input) -> None:
    """Write `content` to a pipe, as fast as it is read, and close it. A reader that stops early is no error."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    try:
        async for piece in pieces_of(content):
            at = 0
            while at < len(piece):
                try:
                    at += os.write(descriptor, piece[at:])
                except BlockingIOError:
                    writable = asyncio.Event()
                    loop.add_writer(descriptor, writable.set)
                    try:
                        await writable.wait()
                    finally:
                        loop.remove_writer(descriptor)
    except BrokenPipeError:
        return
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Execution:
    """A program to run, with what it reads and how much it may take."""

    arguments: Sequence[str]
    seconds: float
    output_bytes: int
    folder: str = ""
    """Relative to the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | Input = b""
    on_output: OnOutput | None = None


class Streams:
    """A program's three streams: pipes, whose other ends are the program's."""

    def __init__(self, asked: Execution) -> None:
        self._started = time.perf_counter()
        self._content = asked.stdin
        stdin, self._input = os.pipe()
        ours_out, stdout = os.pipe()
        ours_err, stderr = os.pipe()
        self.theirs = [stdin, stdout, stderr]
        """The program's ends, until they are closed here."""
        self._stdout = Output(ours_out, asked.output_bytes, asked.on_output)
        self._stderr = Output(ours_err, asked.output_bytes, asked.on_output)
        self._feeding: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The program has its ends: write what it reads."""
        self._close_theirs()
        self._feeding = asyncio.create_task(feed(self._input, self._content))
        self._input = -1

    def _close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = []

    def close(self) -> None:
        """Take the rest of the output, and free everything."""
        self._close_theirs()
        if self._feeding is not None:
            self._feeding.cancel()
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        self._stdout.finish()
        self._stderr.finish()

    def result(self, exit_code: int, timed_out: bool) -> ExecResult:
        """What the program did, with what is kept of its output."""
        return result_of(exit_code, timed_out, self._started, self._stdout, self._stderr)


def result_of(exit_code: int, timed_out: bool, started: float, stdout: Kept, stderr: Kept) -> ExecResult:
    """What a program did that was started then."""
    seconds = time.perf_counter() - started
    truncated = stdout.truncated or stderr.truncated
    return ExecResult(exit_code, stdout.content(), stderr.content(), seconds, timed_out, truncated)


async def within(seconds: float, exiting: Awaitable[int], end: Callable[[], Awaitable[object]]) -> tuple[int, bool]:
    """A program's exit code, and whether its time was over. `end` ends it then, and when this is cancelled."""
    try:
        return await asyncio.wait_for(exiting, seconds), False
    except TimeoutError:
        await end()
        return 124, True
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.ensure_future(end()))
        raise


FILE_S = 60.0
LARGEST_READ = 256 << 20
_PATH = "PATH=$PATH:/usr/bin:/bin; "  # that of the settings may hold the agent's programs alone
_READ = _PATH + (
    'if [ -d "$1" ]; then exit 73; elif [ ! -e "$1" ]; then exit 72; '
    'elif [ ! -f "$1" ] || [ ! -r "$1" ]; then exit 74; fi; exec head -c "$2" -- "$1"'
)
_WRITE = _PATH + (  # with few programs, as each takes a moment to start
    'umask 022; set -C; p=$1; [ -L "$1" ] && p=$(readlink -f -- "$1" || printf %s "$1"); d=${p%/*}; t=$d/.new.$2; m=; '
    '[ -d "$p" ] || [ "${p%/}" != "$p" ] && exit 73; [ -d "$d/" ] || mkdir -p -- "$d" || exit 75; '
    'if [ -e "$p" ]; then [ -w "$p" ] || exit 74; m=$(stat -c %a "$p" 2>/dev/null || stat -f %Lp "$p"); fi; '
    'if cat > "$t" && { [ -z "$m" ] || chmod "$m" "$t"; } && mv -f -- "$t" "$p"; then exit 0; fi; '
    'rm -f -- "$t"; exit 75'
)
_ERRORS = {72: errno.ENOENT, 73: errno.EISDIR, 74: errno.EACCES}
_SAID = {
    "Read-only": errno.EROFS, "No space": errno.ENOSPC, "Permission": errno.EACCES, "Not a directory": errno.ENOTDIR,
    "File exists": errno.ENOTDIR, "too long": errno.ENAMETOOLONG, " fork": errno.EAGAIN,
}  # fmt: skip
"""What a shell says about a failed write; `mkdir -p`, of a file that is no folder: `File exists`."""


class Confined:
    """A sandbox of one kind, and the base class of kinds. Used on the sandboxes' thread only; see `Sandbox`.

    A kind makes it (`start`), runs programs in it (`run`), and ends it (`kill`).
    """

    shell: ClassVar[str] = "/bin/sh"
    gateway_url: str | None = None

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        """`gateway_url`: the run's gateway, as this machine reaches it."""
        self.settings = settings
        self.workspace = settings.workspace

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Raises `SandboxError` if no such sandbox can be made here."""

    @property
    def limits(self) -> Mapping[str, str]:
        raise NotImplementedError

    async def start(self) -> None:
        """Make it. Raises `SandboxError`."""
        raise NotImplementedError

    async def run(self, asked: Execution) -> ExecResult:
        """Run a program. Cancelling it ends the program and its children."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

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
        arguments = [self.shell, "-c", command] if isinstance(command, str) else list(command)
        if not arguments or any("\0" in argument for argument in arguments):
            raise ValueError("a command needs at least a program's name, and no NUL characters")
        longest, most = self.settings.exec_seconds, self.settings.output_bytes
        seconds = min(timeout or longest, longest)
        return await self.run(Execution(arguments, seconds, most, cwd or "", env or {}, stdin, on_output))

    async def read(self, path: str) -> bytes:
        line = ["/bin/sh", "-c", _READ, "sh", self._place_of(path), str(LARGEST_READ + 1)]
        done = await self.run(Execution(line, FILE_S, 1 << 30))
        _check_done(done, path)
        if len(done.stdout) > LARGEST_READ:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return done.stdout

    async def write(self, path: str, content: bytes) -> None:
        line = ["/bin/sh", "-c", _WRITE, "sh", self._place_of(path), secrets.token_hex(8)]
        _check_done(await self.run(Execution(line, FILE_S, 4096, stdin=content)), path)

    def _place_of(self, path: str) -> str:
        """A path as seen inside. Raises FileNotFoundError for what can't be one."""
        if not path or "\0" in path:
            raise FileNotFoundError(2, "no such file", path)
        return os.path.join(self.workspace, path)

    async def end_processes(self) -> None:
        # "all" are those of the sandbox: a kind that doesn't confine them needs another way
        await self.exec(["/bin/sh", "-c", "kill -9 -1"])

    async def close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self.kill))


def _check_done(result: ExecResult, path: str) -> None:
    """Raises the OSError that `_READ` or `_WRITE` met."""
    if result.timed_out:
        raise OSError(errno.ETIMEDOUT, f"took longer than {FILE_S:g} s", path)
    if result.exit_code == 0:
        return
    said = result.stderr.decode(errors="replace")
    meant = next((number for words, number in _SAID.items() if words in said), errno.EIO)
    number = _ERRORS.get(result.exit_code, meant)
    raise OSError(number, os.strerror(number), path)
