"""`Kept`, `Output` and `feed`: a command's streams, read and written on the event loop.

However much a command prints, it is read (so that it isn't blocked), and at most `limit` bytes are kept: the beginning
and the end.
"""

from __future__ import annotations

import asyncio
import os

from ajet.environment.sandboxes.sandbox import OnOutput

CHUNK = 1 << 16
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


async def feed(descriptor: int, content: bytes) -> None:
    """Write `content` to a pipe, as fast as it is read, and close it. A reader that stops early is no error."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    at = 0
    view = memoryview(content)
    try:
        while at < len(view):
            try:
                at += os.write(descriptor, view[at : at + CHUNK])
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
