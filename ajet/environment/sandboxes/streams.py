"""`Kept`, `Output`, `Input` and `feed`: a command's streams, read and written on the event loop.

However much a command prints, it is read (so that it isn't blocked), and at most `limit` bytes are kept: the beginning
and the end.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections import deque
from collections.abc import AsyncIterator, Callable

from ajet.environment.sandboxes.sandbox import ExecResult

OnOutput = Callable[[bytes], None]

CHUNK = 1 << 16


PIECE = 1 << 15


"""Of what is written: the most that goes into one message to a pod."""


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
                    await _writable(loop, descriptor)
    except BrokenPipeError:
        return
    finally:
        os.close(descriptor)


async def _writable(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(descriptor)


FILE_S = 60.0


LARGEST_READ = 256 << 20

_READ = (
    'if [ -d "$1" ]; then exit 73; elif [ ! -e "$1" ]; then exit 72; '
    'elif [ ! -f "$1" ] || [ ! -r "$1" ]; then exit 74; fi; exec head -c "$2" -- "$1"'
)


_WRITE = (
    'p=$(readlink -f -- "$1" 2>/dev/null || printf %s "$1"); [ -d "$p" ] && exit 73; d=$(dirname -- "$p"); '
    'mkdir -p -- "$d" || exit 75; [ -e "$p" ] && [ ! -w "$p" ] && exit 74; '
    't=$(mktemp "$d/.new.XXXXXX") || exit 75; m=644; [ -e "$p" ] && m=$(stat -c %a -- "$p"); '
    'if cat > "$t" && chmod "$m" "$t" && mv -f -- "$t" "$p"; then exit 0; fi; rm -f -- "$t"; exit 75'
)


_ERRORS: dict[int, tuple[type[OSError], int]] = {
    72: (FileNotFoundError, 2),
    73: (IsADirectoryError, 21),
    74: (PermissionError, 13),
}


_SAID = {"Read-only": 30, "No space": 28, "Permission": 13, "Not a directory": 20}


"""What a shell says about a failed write, as error numbers."""


def read_line(workspace: str, path: str) -> list[str]:
    """A command that prints a file. Raises FileNotFoundError for what can't be a path."""
    return ["/bin/sh", "-c", _READ, "sh", _place(workspace, path), str(LARGEST_READ + 1)]


def content_of(result: ExecResult, path: str) -> bytes:
    """What `read_line` printed. Raises OSError."""
    written(result, path)
    if len(result.stdout) > LARGEST_READ:
        raise OSError(27, os.strerror(27), path)
    return result.stdout


def write_line(workspace: str, path: str) -> list[str]:
    """A command that makes a file of its standard input: whole, or not at all."""
    return ["/bin/sh", "-c", _WRITE, "sh", _place(workspace, path)]


def written(result: ExecResult, path: str) -> None:
    """Raises the OSError that one of these commands met."""
    if result.timed_out:
        raise OSError(110, f"took longer than {FILE_S:g} s", path)
    if result.exit_code == 0:
        return
    said = result.stderr.decode(errors="replace")
    kind, number = _ERRORS.get(result.exit_code, (OSError, 5))
    if kind is OSError:
        number = next((number for words, number in _SAID.items() if words in said), 5)
    raise kind(number, os.strerror(number), path)


def _place(workspace: str, path: str) -> str:
    if not path or "\0" in path:
        raise FileNotFoundError(2, "no such file", path)
    return posixpath.join(workspace, path)
