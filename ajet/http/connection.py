"""HTTP/1.1 on one connection: requests in, answers out, one after the other, everything bounded in size and time.

Parsing is `httptools` (llhttp). A request is announced to the application when its headers are there (`admit`), so that
who may not ask is refused before a body is read, and again when it is whole (`handle`). When the client goes away, what
is being done for it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import Any, Protocol, cast

import httptools

from ajet.http.answer import Answer

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32_768
MAX_PIPELINED = 8
"""Requests of one connection that wait for their turn; then reading pauses."""
KEEP_ALIVE_S = 75.0
"""Idle connections stay open longer than the usual clients keep them in their pools (5 to 60 s)."""
LINGER_S = 2.0
"""After an early refusal what is still being sent is read and thrown away for so long: closing at once would reset
the connection, and the client would never see the answer."""
STUCK_WRITE_S = 60.0
"""A reader that takes nothing for so long is gone."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Of all requests being received."""


@dataclass(slots=True)
class HttpRequest:
    """One request. `headers` have lower-case names; of a repeated one the first counts."""

    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    caller: Any = None
    """What `admit` found out."""
    keep_alive: bool = True
    http10: bool = False


class HttpApp(Protocol):
    """What is behind the connections."""

    def admit(self, request: HttpRequest) -> Answer | None:
        """The headers are there: an answer refuses the request without its body."""

    async def handle(self, request: HttpRequest) -> Answer: ...

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        """An error in the form that fits the request's path."""


class HttpServerState:
    """What all connections of a server share."""

    def __init__(self, app: HttpApp, limits: HttpLimits) -> None:
        self.app = app
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.connections: set[HttpConnection] = set()
        self.buffered = 0
        """Bytes of bodies that are not handled yet."""

    def sweep(self) -> None:
        """Cut what is past its deadline."""
        now = self.loop.time()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.expire()


class HttpConnection(asyncio.Protocol):
    def __init__(self, state: HttpServerState) -> None:
        self._state = state
        self._parser: Any = None
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.deadline = inf
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._writable: asyncio.Event | None = None
        """Set while the client takes what is written; exists once it ever did not."""
        self._refused = False
        """The last answer is on its way: nothing more is read from this client."""
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._request = HttpRequest()

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)
        self._parser = httptools.HttpRequestParser(self)
        self.deadline = self._state.loop.time() + self._state.limits.header_deadline_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._forget_body()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        if self._writable is not None:
            self._writable.set()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_again(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError:
            log.exception("fault of the gateway while reading a request")
            self._refuse(500, "internal_error", "internal error of the gateway: see its log")
            return
        except httptools.HttpParserError as error:
            self._refuse(400, "invalid_request", f"not HTTP/1.1: {error}")
            return
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES and not self._refused and self._in_head:
            self._refuse(431, "headers_too_large", f"headers larger than {MAX_HEAD_BYTES} bytes")

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = inf
        if self._refused:
            self._transport.abort()
        elif self._in_head or self._in_body:
            self._refuse(408, "request_timeout", "the request did not arrive in time")
        elif self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        """The server ends."""
        self._transport.abort()

    def _read_again(self, rest: bytes) -> None:
        """A client asks to speak HTTP/2 from now on, as Java's does at first. The parser takes its body for that: read
        the request again as if the client had not asked, which is the answer "no"."""
        request, parser = self._request, self._parser
        if parser.get_method() == b"CONNECT":
            self._refuse(405, "method_not_allowed", "CONNECT is not allowed")
            return
        lines = [parser.get_method() + b" " + self._url + b" HTTP/" + parser.get_http_version().encode()]
        lines += [b"%b: %b" % item for item in request.headers.items() if item[0] not in (b"connection", b"upgrade")]
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        self._in_head = True
        self._request = HttpRequest()
        self._url = b""
        if self._task is None:
            self.deadline = self._state.loop.time() + self._state.limits.header_deadline_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        request = self._request
        self._in_head, self._in_body = False, True
        if self._head_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"headers larger than {MAX_HEAD_BYTES} bytes")
            return
        self._head_bytes = 0
        if self._parser.should_upgrade():
            return
        request.method = self._parser.get_method().decode("latin-1")
        request.path = self._url.partition(b"?")[0].decode("latin-1")
        request.http10 = self._parser.get_http_version() == "1.0"
        request.keep_alive = self._parser.should_keep_alive()
        if self._refused:
            return
        if (refusal := self._state.app.admit(request)) is not None:
            self._refuse_with(refusal)
            return
        limit = self._state.limits.max_body_bytes
        length = request.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            self._refuse(413, "request_too_large", f"the body is larger than {limit} bytes")
            return
        if request.headers.get(b"content-encoding", b"identity") not in (b"identity", b"gzip", b"deflate"):
            self._refuse(415, "unsupported_encoding", "content-encoding must be identity, gzip or deflate")
            return
        if self._task is None:
            self.deadline = self._state.loop.time() + self._state.limits.body_deadline_s
        if request.headers.get(b"expect", b"").lower() == b"100-continue" and self._task is None:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body.append(body)
        self._body_bytes += len(body)
        self._state.buffered += len(body)
        limits = self._state.limits
        if self._body_bytes > limits.max_body_bytes:
            self._refuse(413, "request_too_large", f"the body is larger than {limits.max_body_bytes} bytes")
        elif self._state.buffered > limits.max_buffered_bytes and self._body_bytes > 65_536:
            self._refuse(429, "overloaded", "too many large requests at once")

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_bytes = 0
        if self._refused or self._parser.should_upgrade():
            return
        request = self._request
        request.body = b"".join(self._body)
        self._forget_body()
        encoding = request.headers.get(b"content-encoding")
        if encoding in (b"gzip", b"deflate") and not self._decompress(request):
            return
        self._waiting.append(request)
        if self._task is None:
            self._next()
        elif len(self._waiting) >= MAX_PIPELINED:
            self._transport.pause_reading()

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) for name, value in self._request.headers.items())

    def _decompress(self, request: HttpRequest) -> bool:
        limit = self._state.limits.max_body_bytes
        inflate = zlib.decompressobj(47)  # gzip or zlib, told by its header
        try:
            request.body = inflate.decompress(request.body, limit + 1)
        except zlib.error as error:
            self._refuse(400, "invalid_request", f"the body is not what content-encoding says: {error}")
            return False
        if len(request.body) > limit:
            request.body = b""
            self._refuse(413, "request_too_large", f"the body is larger than {limit} bytes when decompressed")
            return False
        if not inflate.eof:
            self._refuse(400, "invalid_request", "the compressed body is cut short")
            return False
        return True

    def _forget_body(self) -> None:
        self._state.buffered -= self._body_bytes
        self._body, self._body_bytes = [], 0

    # ------------------------------------------------------------ answering

    def _next(self) -> None:
        self.deadline = inf
        self._task = self._state.loop.create_task(self._serve(self._waiting.popleft()))

    async def _serve(self, request: HttpRequest) -> None:
        answer = await self._state.app.handle(request)
        try:
            keep = request.keep_alive and not self._refused
            if isinstance(answer.body, bytes):
                self._transport.write(self._head(request, answer, len(answer.body), keep))
                if self._writable is not None:
                    await self._drained()
            else:
                keep = keep and not request.http10
                await self._stream(request, answer, answer.body, keep)
        finally:
            answer.close()
        self._done(keep)

    async def _stream(self, request: HttpRequest, answer: Answer, chunks: AsyncIterator[bytes], keep: bool) -> None:
        self._transport.write(self._head(request, answer, None, keep))
        async for chunk in chunks:
            if request.http10:
                self._transport.write(chunk)
            else:
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if self._writable is not None:
                await self._drained()
        if not request.http10:
            self._transport.write(b"0\r\n\r\n")

    async def _drained(self) -> None:
        """Wait until the client has taken most of what was written; a reader that takes nothing is cut off."""
        assert self._writable is not None
        try:
            async with asyncio.timeout(STUCK_WRITE_S):
                await self._writable.wait()
        except TimeoutError:
            self._transport.abort()

    def _done(self, keep: bool) -> None:
        """One answer is out: the next request, or the end."""
        self._task = None
        if self._transport.is_closing():
            return
        if not keep:
            self._transport.close()
            return
        if self._waiting:
            self._transport.resume_reading()
            self._next()
            return
        limits = self._state.limits
        receiving = limits.body_deadline_s if self._in_body else limits.header_deadline_s if self._in_head else 0.0
        self.deadline = self._state.loop.time() + (receiving or KEEP_ALIVE_S)

    def _head(self, request: HttpRequest, answer: Answer, length: int | None, keep: bool) -> bytes:
        """Status line and headers; with the body, if its length is known."""
        lines = [f"HTTP/1.1 {answer.status} {_phrase(answer.status)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if length is not None:
            lines.append(f"content-length: {length}")
        elif not request.http10:
            lines.append("transfer-encoding: chunked")
        if not keep:
            lines.append("connection: close")
        elif request.http10:
            lines.append("connection: keep-alive")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if isinstance(answer.body, bytes) and request.method != "HEAD":
            return head + answer.body
        return head

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refuse_with(self._state.app.refuse(self._request, status, code, message))

    def _refuse_with(self, answer: Answer) -> None:
        """Answer now, read on for a moment without looking, and close. Requests before this one are cut off, too: a
        client that breaks the rules gets no second chance on this connection."""
        self._refused = True
        self._forget_body()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._transport.close()
            return
        assert isinstance(answer.body, bytes)
        self._transport.write(self._head(self._request, answer, len(answer.body), keep=False))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._state.loop.time() + LINGER_S


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
