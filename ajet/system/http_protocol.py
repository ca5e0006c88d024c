"""HTTP/1.1 on one connection: requests in, answers out, one after the other, everything bounded in size and time.

Parsing is `httptools` (llhttp). The handler sees a request twice: when its headers have arrived (`admit`), so that an
unauthorised client is refused before its body is read, and when it is complete (`handle`). When the client goes away,
the work being done for it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import Any, Protocol, cast

import httptools

from ajet.system.http.connections import RECEIVED_BYTES, Connections
from ajet.system.http.refusals import LONGEST_PAUSE_S
from ajet.system.http_messages import Answer

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32_768
MAX_STRANGER_BODY = 65_536
"""Of a request that needs no key: a sign-in, say."""
MAX_PIPELINED = 8
"""How many requests of one connection may wait their turn before reading pauses."""
KEEP_ALIVE_S = 75.0
"""Idle connections stay open longer than common clients keep them in their pools (5 to 60 s)."""
LINGER_S = 2.0
"""How long input is still read and discarded after an early refusal: closing at once would reset the connection, and
the client would never see the answer."""
DISCARD_BYTES, DISCARD_PAUSE_S = 65_536, 0.005
"""Discarding takes time, too: after so many bytes it pauses, so much longer the more connections there are to discard
from that all of them together get less, and what is refused keeps nobody else waiting."""
STUCK_WRITE_S = 60.0
"""A client that reads nothing for this long is gone."""
INTERNAL_ERROR = "internal error of the server: see its log"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a server accepts, and how long it waits for it."""

    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    """Of one body, also after decompression."""
    max_buffered_bytes: int = 64 * 1024 * 1024
    """Of all the bodies being received, or waiting behind another request, at a time."""
    max_connections: int | None = None
    """None: as many as the limit on open files allows (see `Connections`)."""


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
    """Whatever `admit` wants to pass on to `handle`."""
    stranger: bool = False
    """Set by `admit` if it let the request pass without a key: such a request has next to no body, and its connection
    makes way for others."""
    payer: Hashable = None
    """Set by `admit`: whose share of the memory for bodies it takes."""
    max_body: int | None = None
    """Set by `admit`: a limit below the server's."""
    keep_alive: bool = True
    http10: bool = False


class HttpHandler(Protocol):
    """What a server does with its requests."""

    def admit(self, request: HttpRequest) -> Answer | None:
        """The headers have arrived: None to read on; an answer refuses the request without reading its body."""

    async def handle(self, request: HttpRequest) -> Answer:
        """Answer a complete request. Cancelled if the client goes away; an exception is logged and answered by 500."""

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        """An error in the form that suits the request's path. Its body must be bytes."""


class HttpConnection(asyncio.BufferedProtocol):
    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._parser: Any = None
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.deadline = inf
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._writable: asyncio.Event | None = None
        """Set while the client keeps up with what is written; None until it first falls behind."""
        self._refused = False
        """The last answer is being sent, maybe after a pause: no other request is read from this client."""
        self._discarding = False
        """It was sent, and what still arrives is thrown away."""
        self._discarded = 0
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._framing_bytes = 0
        """Received since the last piece of a chunked body: a chunk's header, or trailers."""
        self._framed = False
        self._body = bytearray()
        self._max_body = 0
        self._request = HttpRequest()
        self._url = b""
        self._client: tuple[str, int] | None = None

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer := transport.get_extra_info("peername"):
            self._client = (peer[0], peer[1])
        self._shared.add(self)
        self._parser = httptools.HttpRequestParser(self)
        self.deadline = self._shared.loop.time() + self._shared.limits.header_deadline_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.remove(self)
        self._shared.discarding -= self._discarding
        self._forget_body()
        self._forget_waiting()
        if self._task is not None:
            self._task.cancel()
        if self._writable is not None:
            self._writable.set()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.received

    def buffer_updated(self, nbytes: int) -> None:
        self._received(self._shared.received[:nbytes])
        if nbytes == RECEIVED_BYTES and not self._refused and self._transport.is_reading():
            self._transport.pause_reading()
            self._shared.read_later(self)

    def read_on(self) -> None:
        """It is this connection's turn again."""
        if not self._refused:  # meanwhile: then its answer may have to wait
            self._transport.resume_reading()

    def _received(self, data: bytes | memoryview) -> None:
        if self._refused:
            self._discard(len(data))
            return
        if not self._in_body:
            self._head_bytes += len(data)
        self._framed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_again(bytes(data[upgrade.args[0] :]))
            return
        except httptools.HttpParserCallbackError:
            log.exception("internal error while reading a request")
            self._refuse(500, "internal_error", INTERNAL_ERROR)
            return
        except httptools.HttpParserError as error:
            self._refuse(400, "invalid_request", f"not HTTP/1.1: {error}")
            return
        if self._in_body:
            self._framing_bytes = 0 if self._framed else self._framing_bytes + len(data)
        if (self._framing_bytes if self._in_body else self._head_bytes) > MAX_HEAD_BYTES and not self._refused:
            self._refuse(431, "headers_too_large", f"the headers or trailers are larger than {MAX_HEAD_BYTES} bytes")

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded >= DISCARD_BYTES:
            self._discarded = 0
            self._transport.pause_reading()
            self._shared.loop.call_later(DISCARD_PAUSE_S * self._shared.discarding**2, self._transport.resume_reading)

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

    @property
    def idle(self) -> bool:
        """Nothing is being received or answered."""
        return self._task is None and not self._in_head and not self._in_body

    def abort(self) -> None:
        """The server is closing, or needs the place."""
        self._transport.abort()

    def _read_again(self, rest: bytes) -> None:
        """The client offers to switch to HTTP/2, as Java's does at first, and the parser takes the body for HTTP/2.
        Decline by reading the request again without the offer."""
        request, parser = self._request, self._parser
        if parser.get_method() == b"CONNECT":
            self._refuse(405, "method_not_allowed", "CONNECT is not allowed")
            return
        lines = [parser.get_method() + b" " + self._url + b" HTTP/" + parser.get_http_version().encode()]
        lines += [b"%b: %b" % item for item in request.headers.items() if item[0] not in (b"connection", b"upgrade")]
        self._parser = httptools.HttpRequestParser(self)
        self._received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        self._in_head = True
        self._request = HttpRequest()
        self._url = b""
        if self._task is None:
            self.deadline = self._shared.loop.time() + self._shared.limits.header_deadline_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise it is a trailer, which nobody reads
            self._request.headers.setdefault(name.lower(), value)

    def on_chunk_header(self) -> None:
        self._framed = True

    def on_headers_complete(self) -> None:
        request = self._request
        self._in_head, self._in_body = False, True
        if self._head_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"the headers are larger than {MAX_HEAD_BYTES} bytes")
            return
        self._head_bytes = 0
        if self._parser.should_upgrade():
            return
        request.method = self._parser.get_method().decode("latin-1")
        path, _, request.query = self._url.partition(b"?")
        request.path = path.decode("latin-1")
        request.client = self._client
        request.http10 = self._parser.get_http_version() == "1.0"
        request.keep_alive = self._parser.should_keep_alive()
        if self._refused:
            return
        if (refusal := self._shared.handler.admit(request)) is not None:
            self._refuse_with(refusal)
            return
        if not request.stranger and not self._shared.know(self):
            self._refuse(429, "overloaded", "the server has too many connections in use: try again later")
            return
        limit = self._shared.limits.max_body_bytes
        most = MAX_STRANGER_BODY if request.stranger else request.max_body
        self._max_body = limit = limit if most is None else min(limit, most)
        length = request.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            self._refuse(413, "request_too_large", f"the body is larger than {limit} bytes")
            return
        if request.headers.get(b"content-encoding", b"identity") not in (b"identity", b"gzip", b"deflate"):
            self._refuse(415, "unsupported_encoding", "content-encoding must be identity, gzip or deflate")
            return
        if self._task is None:
            self.deadline = self._shared.loop.time() + self._shared.limits.body_deadline_s
        if request.headers.get(b"expect", b"").lower() == b"100-continue" and self._task is None:
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._framed = True
        self._body += body
        room = self._shared.take(self._request.payer, len(body))
        if len(self._body) > self._max_body:
            self._refuse(413, "request_too_large", f"the body is larger than {self._max_body} bytes")
        elif not room and len(self._body) > 65_536:
            self._refuse(429, "overloaded", "the server is receiving too many large requests: try again later")

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_bytes = self._framing_bytes = 0
        if self._refused or self._parser.should_upgrade():
            return
        request = self._request
        request.body = bytes(self._body)
        self._forget_body()
        encoding = request.headers.get(b"content-encoding")
        if encoding in (b"gzip", b"deflate") and not self._decompress(request):
            return
        self._waiting.append(request)
        self._shared.take(request.payer, len(request.body))
        if self._task is None:
            self._next()
        elif len(self._waiting) >= MAX_PIPELINED:
            self._transport.pause_reading()

    def _head_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) for name, value in self._request.headers.items())

    def _decompress(self, request: HttpRequest) -> bool:
        limit = self._max_body
        inflate = zlib.decompressobj(47)  # gzip or zlib, told by its header
        try:
            request.body = inflate.decompress(request.body, limit + 1)
        except zlib.error as error:
            self._refuse(400, "invalid_request", f"the body does not match its content-encoding: {error}")
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
        self._shared.give_back(self._request.payer, len(self._body))
        self._body = bytearray()

    def _forget_waiting(self) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            self._shared.give_back(request.payer, len(request.body))

    # ------------------------------------------------------------ answering

    def _next(self) -> None:
        self.deadline = inf
        request = self._waiting.popleft()
        self._shared.give_back(request.payer, len(request.body))
        self._task = self._shared.loop.create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        try:
            answer = await self._shared.handler.handle(request)
        except Exception:  # our fault: the client gets a 500, and the server lives on
            log.exception("internal error in %s %s", request.method, request.path)
            answer = self._shared.handler.refuse(request, 500, "internal_error", INTERNAL_ERROR)
        try:
            if pause := self._pause(answer, request):
                request.body = b""
                await asyncio.sleep(pause)
            keep = request.keep_alive and not self._refused
            if isinstance(answer.body, bytes):
                self._transport.write(self._head(request, answer, len(answer.body), keep))
                if self._writable is not None:
                    await self._drained()
            else:
                keep = keep and not request.http10
                await self._stream(request, answer, answer.body, keep)
        except Exception:  # cut the answer off, so that the client can't mistake it for a complete one
            log.exception("internal error while answering %s %s", request.method, request.path)
            self._transport.abort()
        finally:
            answer.close()
        self._done(keep)

    async def _stream(self, request: HttpRequest, answer: Answer, chunks: AsyncIterator[bytes], keep: bool) -> None:
        self._transport.write(self._head(request, answer, None, keep))
        if _has_no_body(request, answer):
            return
        async for chunk in chunks:
            if request.http10:
                self._transport.write(chunk)
            elif chunk:
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if self._writable is not None:
                await self._drained()
        if not request.http10:
            self._transport.write(b"0\r\n\r\n")

    async def _drained(self) -> None:
        """Wait until the client has read most of what was written; one that reads nothing is cut off."""
        assert self._writable is not None
        try:
            async with asyncio.timeout(STUCK_WRITE_S):
                await self._writable.wait()
        except TimeoutError:
            self._transport.abort()

    def _done(self, keep: bool) -> None:
        """One answer is sent: turn to the next request, or close."""
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
        limits = self._shared.limits
        receiving = limits.body_deadline_s if self._in_body else limits.header_deadline_s if self._in_head else 0.0
        self.deadline = self._shared.loop.time() + (receiving or KEEP_ALIVE_S)

    def _head(self, request: HttpRequest, answer: Answer, length: int | None, keep: bool) -> bytes:
        """Status line and headers, and the body if its length is known."""
        lines = [f"HTTP/1.1 {answer.status} {_phrase(answer.status)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if _has_no_body(request, answer):
            pass
        elif length is not None:
            lines.append(f"content-length: {length}")
        elif not request.http10:
            lines.append("transfer-encoding: chunked")
        if not keep:
            lines.append("connection: close")
        elif request.http10:
            lines.append("connection: keep-alive")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if length is None or _has_no_body(request, answer):
            return head
        assert isinstance(answer.body, bytes)
        return head + answer.body

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refuse_with(self._shared.handler.refuse(self._request, status, code, message))

    def _refuse_with(self, answer: Answer) -> None:
        """Answer, discard what still arrives for a moment, and close. Earlier requests on this connection are cut
        off, too: a client that breaks the rules loses the connection. Only the first refusal counts."""
        if self._refused:
            return
        self._refused = True
        self._forget_body()
        self._forget_waiting()
        if self._task is not None:
            self._task.cancel()
            self._transport.close()
        elif pause := self._pause(answer, self._request):
            self.deadline = inf
            self._transport.pause_reading()
            self._shared.loop.call_later(pause, self._end_with, answer)
        else:
            self._end_with(answer)

    def _pause(self, answer: Answer, request: HttpRequest) -> float:
        """How long this answer waits."""
        if not HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return 0.0
        refusals = self._shared.refusals
        pause = refusals.pause(request.payer, self._shared.loop.time())
        if pause and refusals.untold():
            log.warning(
                "a client is refused again and again (%s %s: %d): its refusals wait, up to %.0f s (said once)",
                *(request.method, request.path, answer.status, LONGEST_PAUSE_S),
            )
        return pause

    def _end_with(self, answer: Answer) -> None:
        if self._transport.is_closing():
            return
        self._discarding = True
        self._shared.discarding += 1
        assert isinstance(answer.body, bytes)
        self._transport.write(self._head(self._request, answer, len(answer.body), keep=False))
        if self._transport.can_write_eof():
            with suppress(OSError):  # the client has just gone: reading will notice
                self._transport.write_eof()
        self._transport.resume_reading()
        self.deadline = self._shared.loop.time() + LINGER_S


def _has_no_body(request: HttpRequest, answer: Answer) -> bool:
    """Whether HTTP forbids a body here, whatever the handler gave."""
    return request.method == "HEAD" or answer.status in (204, 304)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
