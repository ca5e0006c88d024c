"""`AsgiHandler`: serves an ASGI application, such as one of Starlette's, through an `HttpServer`.

Requests reach the application complete, within the server's limits; responses may stream. When the client goes away,
the application's task is cancelled. There is no lifespan and no WebSocket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import unquote

from ajet.system.http_messages import Answer
from ajet.system.http_protocol import HttpRequest

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_FRAMING = ("content-length", "transfer-encoding", "connection")


class AsgiHandler:
    """An `HttpHandler` that asks an application."""

    def __init__(self, app: AsgiApp, knows: Callable[[HttpRequest], bool] | None = None) -> None:
        """`knows`: whether a request comes from somebody who has signed in, by its headers; None: all have."""
        self._app = app
        self._knows = knows
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, request: HttpRequest) -> Answer | None:
        if not request.path.startswith("/"):
            return self.refuse(request, 400, "invalid_request", "the request's target must begin with /")
        request.stranger = self._knows is not None and not self._knows(request)
        return None

    async def handle(self, request: HttpRequest) -> Answer:
        exchange = _Exchange(request)
        task = asyncio.create_task(exchange.run(self._app))
        self._tasks.add(task)  # it may outlive the answer: an application can have background tasks
        task.add_done_callback(self._tasks.discard)

        def close() -> None:
            if not exchange.delivered:
                task.cancel()

        try:
            first = await exchange.next_chunk()
        except BaseException:
            close()
            raise
        if exchange.delivered:
            return Answer(exchange.status, first, exchange.headers)
        return Answer(exchange.status, exchange.chunks(first), exchange.headers, close)

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        headers = {"content-type": "text/plain; charset=utf-8", "x-content-type-options": "nosniff"}
        return Answer(status, f"{message}\n".encode(), headers)


class _Exchange:
    """One request and its response, as the application receives and sends them."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._received = False
        self._complete = asyncio.Event()
        """The application has sent its last chunk."""
        self._sent: asyncio.Queue[tuple[bytes, bool] | Exception] = asyncio.Queue(1)
        """Chunks, and whether more follow. Bounded, so that an application streams no faster than its client reads."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.delivered = False
        """The last chunk has been taken."""

    async def run(self, app: AsgiApp) -> None:
        try:
            await app(_scope(self._request), self._receive, self._send)
            if not self._complete.is_set():
                raise RuntimeError("the application returned before its response was complete")
        except Exception as error:
            if self._complete.is_set():
                log.exception("internal error after answering %s %s", self._request.method, self._request.path)
            else:
                await self._sent.put(error)

    async def next_chunk(self) -> bytes:
        """The next part of the body. Raises what the application raised."""
        sent = await self._sent.get()
        if isinstance(sent, Exception):
            raise sent
        chunk, more = sent
        self.delivered = not more
        return chunk

    async def chunks(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        while not self.delivered:
            yield await self.next_chunk()

    async def _receive(self) -> Message:
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._complete.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = _headers(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            more = message.get("more_body", False)
            if not more:
                self._complete.set()
            await self._sent.put((bytes(message.get("body", b"")), more))


def _scope(request: HttpRequest) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.0" if request.http10 else "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(request.path),
        "raw_path": request.path.encode("latin-1"),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers.items()),
        "client": request.client,
        "server": None,
    }


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if not {"\r", "\n", "\0"}.isdisjoint(name + value):
            raise ValueError(f"the header {name!r} has a control character in it")
        if name == "set-cookie" and name in headers:
            raise ValueError("a response can set only one cookie")
        if name not in _FRAMING:
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
