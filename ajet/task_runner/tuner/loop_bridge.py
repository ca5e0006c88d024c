"""`LoopBridge`: from a workflow's thread to the service loop and back. A request goes over; its answer (or the answer's
stream) comes back.

Works from any thread and any event loop, including the service loop itself (if awaited). Cancelling the caller cancels
the call.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

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
