"""`Kept`, `Output`, `Input` and `feed`: a command's streams, read and written on the event loop.

However much a command prints, it is read (so that it isn't blocked), and at most `limit` bytes are kept: the beginning
and the end.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable

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
