"""`POST /v1/traces`: OpenTelemetry spans of an episode, as OTLP protobuf or JSON.

Rewards in spans count only with the control key.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ajet.gateway.protocol import Caller
from ajet.observe.otlp import MAX_BYTES, MAX_SPANS, PATH, Rejected, receive
from ajet.observe.tracing import by_our_clock
from ajet.schema.span import Span
from ajet.system.http_messages import Answer, HttpLimits, HttpRequest, InvalidKeyError, json_answer, presented_key
from ajet.system.http_server import HttpServer


async def traces(body: bytes, content_type: str, caller: Caller) -> Answer:
    """Keep the spans with the episode."""
    session = caller.session
    session.check_open()

    async def keep(spans: Sequence[Span], left_out: int) -> Rejected:
        session.check_open()
        session.spans.leave_out(left_out)
        session.add_spans(by_our_clock(spans, time.time()), rewards_count=caller.control)
        return Rejected(left_out, "the episode keeps no more spans")

    return await receive(body, content_type, session.spans.room, keep)


TOKEN_PATH = "/v3/auth/token"
"""Where an AgentOps client changes its key for a token. Here they are the same."""
LOGS_PATH = "/v4/logs/upload/"
"""Where it sends the program's output, which is accepted and dropped."""
HEALTH_PATH = "/healthz"
Sink = Callable[[Sequence[Span]], Awaitable[None]]
"""Keeps spans. Raises a UserError if it can't."""


class SpanCollector:
    """An HTTP server that takes the spans of AgentOps clients and OTLP exporters, and hands them to a sink."""

    def __init__(self, key: str, sink: Sink) -> None:
        self._key, self._sink = key, sink
        self._server = HttpServer(self, HttpLimits(max_body_bytes=MAX_BYTES))
        self.received = 0
        """Spans so far."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises AddressError."""
        await self._server.start(host, port, "--host or --port")

    @property
    def url(self) -> str:
        return self._server.address.url

    async def aclose(self) -> None:
        await self._server.aclose()

    def admit(self, request: HttpRequest) -> Answer | None:
        if request.path in (HEALTH_PATH, TOKEN_PATH):
            request.unauthenticated = True
        if request.path == HEALTH_PATH:
            return None
        if request.path not in (PATH, TOKEN_PATH, LOGS_PATH):
            return _error(404, f"no such path: {request.path[:200]}; traces go to {PATH}")
        if request.method != "POST":
            return _error(405, f"{request.path} takes POST")
        if request.path == TOKEN_PATH:  # the key is in the body
            return None
        try:
            given = presented_key(request)
        except InvalidKeyError as error:
            return _error(401, str(error))
        return None if self._fits(given) else _error(401, "not this endpoint's key")

    async def handle(self, request: HttpRequest) -> Answer:
        if request.path == HEALTH_PATH:
            return json_answer({"status": "ok"})
        if request.path == TOKEN_PATH:
            return self._token(request.body)
        if request.path == LOGS_PATH:
            return json_answer({"id": "", "url": ""})
        kind = request.headers.get(b"content-type", b"").decode("latin-1")
        return await receive(request.body, kind, MAX_SPANS, self._keep)

    async def _keep(self, spans: Sequence[Span], left_out: int) -> Rejected:
        await self._sink(spans)
        self.received += len(spans)
        return Rejected(left_out, f"a request holds {MAX_SPANS} spans at most")

    def _token(self, body: bytes) -> Answer:
        try:
            given: Any = msgspec.json.decode(body, type=dict[str, Any]).get("api_key")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            given = None
        if not isinstance(given, str) or not self._fits(given):
            return _error(401, "not this endpoint's key")
        return json_answer({"token": self._key, "project_id": "ajet", "project_prem_status": "pro"})

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._key.encode())

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return _error(status, message)


def _error(status: int, message: str) -> Answer:
    return json_answer({"error": {"message": message}}, status)
