"""HTTP transports that are function calls: with them the official clients talk to a session without a socket.

OpenAI's and Anthropic's Python clients are built on `httpx` or, in newer versions, on its successor `httpx2`; the
transports are made for the one that the client at hand uses.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

from ajet.http.answer import Answer
from ajet.tuner.crossing import Crossing

BASE_URL = "http://ajet.in-process/v1"
API_KEY = "sk-ajet-in-process"


def http_library(client_class: type) -> ModuleType:
    """The library whose client `client_class` (an SDK's default HTTP client) is made from."""
    for base in client_class.__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("httpx", "httpx2"):
            return sys.modules[name]
    raise TypeError(f"{client_class} is not an httpx client")


def async_transport(crossing: Crossing, client_class: type) -> Any:
    return _transports(http_library(client_class))[0](crossing)


def blocking_transport(crossing: Crossing, client_class: type) -> Any:
    return _transports(http_library(client_class))[1](crossing)


def _read_timeout(request: Any) -> float | None:
    return cast("float | None", request.extensions.get("timeout", {}).get("read"))


@lru_cache
def _transports(httpx: Any) -> tuple[type, type]:
    import asyncio

    class AsyncBody(httpx.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None]) -> None:
            self._chunks = chunks
            self._close = close

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._chunks

        async def aclose(self) -> None:
            self._close()

    class Body(httpx.SyncByteStream):  # type: ignore[misc]
        def __init__(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
            self._chunks = chunks
            self.close = close

        def __iter__(self) -> Iterator[bytes]:
            return self._chunks

    def response(answer: Answer, body: Any, request: Any) -> Any:
        if isinstance(answer.body, bytes):
            return httpx.Response(answer.status, headers=answer.headers, content=answer.body, request=request)
        return httpx.Response(answer.status, headers=answer.headers, stream=body, request=request)

    class AsyncTransport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self, crossing: Crossing) -> None:
            self._crossing = crossing

        async def handle_async_request(self, request: Any) -> Any:
            content = await request.aread()
            try:
                async with asyncio.timeout(_read_timeout(request)):
                    answer = await self._crossing.ask(request.method, request.url.path, content)
            except TimeoutError:
                raise httpx.ReadTimeout("no answer in the time the client gave", request=request) from None
            return response(
                answer, None if isinstance(answer.body, bytes) else AsyncBody(answer.body, answer.close), request
            )

    class Transport(httpx.BaseTransport):  # type: ignore[misc]
        def __init__(self, crossing: Crossing) -> None:
            self._crossing = crossing

        def handle_request(self, request: Any) -> Any:
            body = request.read()
            try:
                answer, chunks = self._crossing.ask_blocking(
                    request.method, request.url.path, body, _read_timeout(request)
                )
            except TimeoutError:
                raise httpx.ReadTimeout("no answer in the time the client gave", request=request) from None
            return response(answer, Body(chunks, answer.close), request)

    return AsyncTransport, Transport
