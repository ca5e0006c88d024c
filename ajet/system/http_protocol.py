"""HTTP/1.1 on one connection: uvicorn's protocol over httptools, with limits on what unauthenticated clients can use.

uvicorn parses and frames. This module adds the limits that it lacks: on the size of heads and trailers, the time for a
head, the number of pipelined requests, and the time a client may read nothing. It also cancels work for a client that
has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from ajet.system.http_messages import Answer, AsgiApp, HttpLimits, HttpRequest, Refuse

MAX_HEAD_BYTES = 32_768
"""The limit for a request's headers and trailers, and any other bytes outside a body."""
MAX_PIPELINED = 32
"""How many requests of one connection may wait behind another. They are parsed before reading pauses."""
READ_BYTES = 65_536
"""The size of one read. With asyncio's 256 KiB, each read needs fresh pages from the kernel, which takes 20 µs."""
LINGER_S = 2.0
"""How long input is still read and discarded after an early refusal: closing at once would reset the connection, and
the client would never see the answer."""
STUCK_WRITE_S = 60.0
"""A client that reads nothing for this long is disconnected."""
KEEP_ALIVE_S = 75
"""Idle connections stay open longer than common clients keep them in their pools (5 to 60 s)."""
MOST_CONNECTIONS = 16_384
FEWEST_CONNECTIONS = 16
NEWCOMERS = 4
"""One in so many slots is reserved for connections without a request in progress."""
GRACE_S = 0.25
"""How long a client has to send a request before its slot may go to another."""
_OFFERS = (b"connection", b"upgrade", b"http2-settings")

_quiet = logging.getLogger(f"{__name__}.uvicorn")
_quiet.setLevel(logging.CRITICAL + 1)  # it logs a line for each broken request, so anybody could fill the log


class Connections(ServerState):
    """The connections of one server. When all slots are taken, a new connection replaces the oldest one without a
    request in progress; those that never had a valid key go first."""

    def __init__(self, app: AsgiApp, refuse: Refuse, limits: HttpLimits) -> None:
        super().__init__()
        self.refuse, self.limits = refuse, limits
        self.most = most_connections()
        self.config = Config(
            app,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self.unauthenticated: dict[HttpConnection, None] = {}
        self.authenticated: dict[HttpConnection, None] = {}
        """Connections that sent a valid key and have no request in progress."""
        self.busy: dict[HttpConnection, None] = {}
        """Connections whose request has a valid key and is being answered."""

    def __len__(self) -> int:
        return len(self.unauthenticated) + len(self.authenticated) + len(self.busy)

    @property
    def crowded(self) -> bool:
        """Whether only the slots reserved for new connections are left, which would otherwise find no connection to
        replace."""
        return len(self.busy) >= self.most - max(1, self.most // NEWCOMERS)

    async def wait_for_slot(self) -> None:
        while len(self) >= self.most:
            oldest = next(iter(self.unauthenticated or self.authenticated))
            if (young := oldest.accepted + GRACE_S - oldest.loop.time()) > 0:
                await asyncio.sleep(young)
            else:
                oldest.abort()

    def accept(self) -> HttpConnection:
        """Add a new connection. It has a slot already: see `wait_for_slot`."""
        connection = HttpConnection(self)
        self.unauthenticated[connection] = None
        return connection

    def move(self, connection: HttpConnection, place: dict[HttpConnection, None] | None) -> None:
        """Move a connection to the end of one of the three queues. With None, or if it has ended, remove it from
        all."""
        for one in (self.unauthenticated, self.authenticated, self.busy):
            one.pop(connection, None)
        if place is not None and not connection.gone:
            place[connection] = None

    def abort(self) -> None:
        """End them all."""
        for connection in (*self.unauthenticated, *self.authenticated, *self.busy):
            connection.abort()


class _RefusedHead(Exception):
    """Raised in the parser's callbacks to stop it: status, code, message."""


def _too_large() -> _RefusedHead:
    return _RefusedHead(431, "headers_too_large", f"the headers or trailers are larger than {MAX_HEAD_BYTES} bytes")


class HttpConnection(HttpToolsProtocol):
    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.config, connections, {})
        self.places = connections
        self.logger, self.access_log = _quiet, False
        self.accepted = self.loop.time()
        self.arrival: asyncio.Task[None] | None = None
        """The task that waits for the TLS handshake."""
        self.serving: asyncio.Task[Any] | None = None
        """The task that answers its request. Cancelled when the client disconnects."""
        self.refusal: tuple[int, str, str] | None = None
        """Why the rest of the body that is being read will never come."""
        self.gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._head_bytes = self._unframed = 0
        """Bytes of headers and trailers since the last byte of a body, or the last end of a head."""
        self._in_head = self._in_body = self._keep_alive = False
        self._ended = False
        """Nothing more is read from this client."""

    # ------------------------------------------------------------ coming and going

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        with suppress(AttributeError):  # other event loops have no such setting
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self._limit_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self.pipeline.clear()
        for timer in (self._timer, self._stuck, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        if self.serving is not None:
            self.serving.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close it at once."""
        self.leave()
        if self.arrival is not None and not self.arrival.done():
            self.arrival.cancel()
        else:
            self.transport.abort()

    def leave(self) -> None:
        """Give its slot back."""
        self.gone = True
        self.places.move(self, None)

    def timeout_keep_alive_handler(self) -> None:
        self.abort()  # `close` would wait for a client that reads nothing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(STUCK_WRITE_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def _limit_time(self) -> None:
        """Start the deadline by which a request's headers must be complete."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._timer = self.loop.call_later(self.places.limits.header_deadline_s, self._late)

    def _late(self) -> None:
        if self._in_head:
            self._refuse(408, "request_timeout", "the request did not arrive in time")
        else:
            self.abort()

    # ------------------------------------------------------------ receiving

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        self._unframed += len(data)
        try:
            self._feed(data)
            if self._unframed > MAX_HEAD_BYTES:
                raise _too_large()
        except _RefusedHead as refused:
            self._refuse(*refused.args)
        except httptools.HttpParserError as error:
            cause = error.__context__
            why = cause.args if isinstance(cause, _RefusedHead) else (400, "invalid_request", f"not HTTP/1.1: {error}")
            self._refuse(*why)
        else:
            self._limit_time()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_offer() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _without_offer(self) -> bytes:
        """The head of a request that offers to switch to HTTP/2, as Java's first does, or to a WebSocket. The parser
        takes its body for the new protocol: it reads the request again without the offer."""
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _OFFERS]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._in_head:  # otherwise it is a trailer, which nobody reads
            super().on_header(name, value)
        if len(self.url) + self._head_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    def on_headers_complete(self) -> None:
        self._in_head, self._unframed = False, 0
        if not self.url.startswith(b"/"):
            raise _RefusedHead(400, "invalid_request", "the request's target must begin with /")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":  # it switches without an offer that `_without_offer` could drop
                raise _RefusedHead(405, "method_not_allowed", "CONNECT is not served")
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedHead(429, "overloaded", f"more than {MAX_PIPELINED} requests wait on this connection")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.scope["ajet.connection"] = self  # type: ignore[typeddict-unknown-key]
        self.scope["asgi"]["spec_version"] = "2.4"  # sending to a client that has gone raises
        super().on_headers_complete()
        self.scope["ajet.cycle"] = self.cycle  # type: ignore[typeddict-unknown-key]
        self._in_body = True
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, True  # while it still sends, see `_linger`

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_body:  # it made no offer
            self._in_body, self._unframed = False, 0
            self.cycle.keep_alive = self._keep_alive
            super().on_message_complete()

    # ------------------------------------------------------------ answering

    async def send_whole(self, cycle: Any, answer: Answer) -> None:
        """What uvicorn does with an answer whose body is there already, in one piece: the client is woken up once."""
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        data = _as_bytes(answer, cycle.scope["method"], cycle.keep_alive and not self._closes_after)
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(data)
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def on_response_complete(self) -> None:
        self.serving = None
        closes = self._closes_after
        super().on_response_complete()
        if closes:
            self._linger()

    @property
    def _closes_after(self) -> bool:
        """Whether the answer is the last one: its client must know, or it sends its next request in vain."""
        return not self.pipeline and (self._ended or self._in_body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, after the requests that came before, and read no more from this client."""
        self._ended = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_as_bytes(self.places.refuse(HttpRequest(), status, code, message), "", False))
            self._linger()
        elif self._in_body:  # what reads it sees the refusal
            self.refusal = (status, code, message)
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _linger(self) -> None:
        """Close, after the client has had time to read the answer."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_S, self.abort)
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has just gone: reading will notice
                self.transport.write_eof()


def _as_bytes(answer: Answer, method: str, keep_alive: bool) -> bytes:
    assert isinstance(answer.body, bytes)
    lines = [f"{name}: {value}\r\n" for name, value in answer.headers.items()]
    if answer.status not in (204, 304):
        lines.append(f"content-length: {len(answer.body)}\r\n")
    if not keep_alive:
        lines.append("connection: close\r\n")
    head = "".join(lines)
    if not head.count("\r") == head.count("\n") == len(lines) or "\0" in head:
        raise ValueError(f"a header of the answer has a line break: {answer.headers!r:.500}")
    body = b"" if method == "HEAD" else answer.body
    return STATUS_LINE[answer.status] + head.encode("latin-1") + b"\r\n" + body


def most_connections() -> int:
    """Half of the process's limit for open files: the rest is for its own use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft < 0 else max(FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, soft // 2))
