"""From a workflow to the model and back: `LoopBridge` within a process, `HttpBridge` from a worker process.

`LoopBridge` takes a request from a workflow's thread to the service loop; its answer (or the answer's stream) comes
back. It works from any thread and any event loop, including the service loop itself (if awaited). Cancelling the caller
cancels the call.

`HttpBridge` speaks HTTP/1.1 as our own gateway does, and no more: a request and its whole answer at a time, over
connections that stay open. In a process that was forked a moment ago, a client library's way to the same bytes costs
several times as much as the rest of the episode. Cancelling the caller closes its connection, which cancels the call.
"""

from __future__ import annotations

import asyncio
import ipaddress
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from ajet.gateway.caller import Caller
from ajet.gateway.endpoints import answer
from ajet.system.http_messages import Answer

T = TypeVar("T")

_END = object()


class Asked(Protocol):
    """What answers the requests of an event loop."""

    async def ask(self, method: str, path: str, body: bytes) -> Answer: ...


class LoopBridge:
    """Connects one agent to its episode's session."""

    def __init__(self, caller: Caller, loop: asyncio.AbstractEventLoop) -> None:
        self.caller = caller
        self._loop = loop

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the service loop."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, function: Callable[[], T]) -> T:
        """Call a short function on the service loop and wait for its result."""
        if _running_loop() is self._loop:
            return function()
        return self.submit(_call(function)).result()

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Ask from an event loop. If the answer is a stream, read it in the same loop."""
        reply = await asyncio.wrap_future(self.submit(answer(method, path, body, self.caller)))
        if isinstance(reply.body, bytes):
            return reply
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        close = self._pump(reply, lambda item: loop.call_soon_threadsafe(arrived.put_nowait, item))
        return Answer(reply.status, _read(arrived), reply.headers, close)

    def ask_blocking(
        self, method: str, path: str, body: bytes, timeout: float | None
    ) -> tuple[Answer, Iterator[bytes]]:
        """Ask from a plain thread; the iterator yields the answer's body. Raises TimeoutError."""
        if _running_loop() is self._loop:
            raise RuntimeError("a blocking client can't be used on the service loop: it would wait for itself")
        asked = self.submit(answer(method, path, body, self.caller))
        try:
            reply = asked.result(timeout)
        except BaseException:
            asked.cancel()
            raise
        if isinstance(reply.body, bytes):
            return reply, iter([reply.body])
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        close = self._pump(reply, arrived.put)
        return Answer(reply.status, reply.body, reply.headers, close), iter(arrived.get, _END)

    def _pump(self, reply: Answer, put: Callable[[object], object]) -> Callable[[], None]:
        """Start handing over a stream's chunks; return a function that stops it."""
        pump = self.submit(_hand_over(reply, put))

        def stop() -> None:
            pump.cancel()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(reply.close)

        return stop


class AnsweredBridge:
    """A bridge whose first request has already been made: asking it returns that answer."""

    def __init__(self, bridge: Asked, first: Answer) -> None:
        self._bridge = bridge
        self._first: Answer | None = first

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        first, self._first = self._first, None
        return first if first is not None else await self._bridge.ask(method, path, body)


async def _call(function: Callable[[], T]) -> T:
    return function()


async def _hand_over(reply: Answer, put: Callable[[object], object]) -> None:
    """Runs on the service loop, until the stream ends or its reader's loop is closed."""
    assert not isinstance(reply.body, bytes)
    try:
        async for chunk in reply.body:
            put(chunk)
        put(_END)
    except RuntimeError as error:
        if "loop is closed" not in str(error):
            raise
    finally:
        reply.close()


async def _read(arrived: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
    while (item := await arrived.get()) is not _END:
        yield item


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


MOST_HEAD_BYTES = 64 * 1024

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpBridge:
    """Connects one agent to its episode's session at the gateway."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """`base_url`: one that `can_reach`."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname, parts.port
        self._head = f"host: {parts.netloc}\r\nauthorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Connection]] = WeakKeyDictionary()

    @staticmethod
    def can_reach(base_url: str) -> bool:
        """Whether it is plain HTTP on this machine, by an address that no resolver has to be asked for."""
        parts = urlsplit(base_url)
        try:
            here = ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return False
        return here and parts.scheme == "http" and parts.path == "/v1"

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Raises OSError if there is no answer, or none that our gateway would give."""
        request = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            answer = await self._exchange(idle.pop(), request, idle, reused=True)
            if answer is not None:
                return answer
        connection = await asyncio.open_connection(self._host, self._port, limit=MOST_HEAD_BYTES)
        answer = await self._exchange(connection, request, idle, reused=False)
        assert answer is not None
        return answer

    async def _exchange(
        self, connection: _Connection, request: bytes, idle: list[_Connection], *, reused: bool
    ) -> Answer | None:
        """None if a reused connection turns out to have been closed while it was idle."""
        reader, writer = connection
        keep = begun = False
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            begun = True
            status, headers = _read_head(head)
            body = await reader.readexactly(int(headers["content-length"]))
            keep = headers.get("connection", "").lower() != "close"
            return Answer(status, body, headers)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if reused and not begun and not getattr(error, "partial", b""):
                return None
            raise ConnectionError("the gateway closed the connection before its answer was complete") from error
        except (asyncio.LimitOverrunError, LookupError, ValueError) as error:
            raise ConnectionError(f"the gateway's answer is not readable: {error}") from error
        finally:
            if keep:
                idle.append(connection)
            else:
                writer.close()


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers, by their lower-case names."""
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}
