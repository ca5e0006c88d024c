"""What the HTTP server and its handlers exchange: `HttpRequest` in, `Answer` out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

encode = msgspec.json.Encoder().encode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

INTERNAL_ERROR = "internal error of the server: see its log"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a server accepts, and how long it waits for it."""

    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    """Of one body, also after decompression."""
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Of all the bodies being received at a time."""
    max_connections: int | None = None
    """None: as many as the limit on open files allows."""


@dataclass(slots=True)
class HttpRequest:
    """One request. `headers` have lower-case names; if one is repeated, the first counts."""

    method: str = ""
    path: str = ""
    """Not decoded."""
    query: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    client: tuple[str, int] | None = None
    """The client's host and port."""
    caller: Any = None
    """What `admit` wants to pass on to `handle`."""
    unauthenticated: bool = False
    """Set by `admit` if it let the request pass without a key: then its body must be small."""
    max_body: int | None = None
    """Set by `admit`: a limit below the server's."""


@dataclass(slots=True)
class Answer:
    """One response, independent of what carries it to the client. As an ASGI application, it sends itself."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    """Without those that frame the body (content-length, transfer-encoding, connection): the server adds them."""
    close: Callable[[], None] = lambda: None
    """Ends a stream whose reader has gone, whether or not reading had begun. Called on the service loop."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            if not isinstance(self.body, bytes) and scope["http_version"] == "1.0":
                self.body = b"".join([chunk async for chunk in self.body])  # HTTP/1.0 has no chunks
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
            if isinstance(self.body, bytes) and self.status not in (204, 304):
                headers.append((b"content-length", b"%d" % len(self.body)))
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            if isinstance(self.body, bytes):
                await send({"type": "http.response.body", "body": self.body})
                return
            if scope["method"] != "HEAD":
                async for chunk in self.body:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self.close()


class HttpHandler(Protocol):
    """What a server does with its requests."""

    def admit(self, request: HttpRequest) -> Answer | None:
        """The headers have arrived: None to read on; an answer refuses the request without reading its body."""

    async def handle(self, request: HttpRequest) -> AsgiApp:
        """Answer a complete request: with an `Answer`, or with the ASGI application that will. Cancelled if the client
        goes away; an exception is logged and answered by 500."""

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        """An error in the form that suits the request's path. Its body must be bytes."""


Refuse = Callable[[HttpRequest, int, str, str], Answer]


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, encode(value), {"content-type": "application/json", **(headers or {})})


def server_sent_event(value: Any, name: str = "") -> bytes:
    event = b"data: " + encode(value) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + event if name else event


def event_stream(chunks: AsyncIterator[bytes], close: Callable[[], None]) -> Answer:
    """Server-sent events; `close` ends them."""
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return Answer(200, chunks, headers, close)
