"""`POST /v1/traces`: OpenTelemetry spans of an episode, as OTLP protobuf or JSON.

Sizes are checked first; reading happens off the service loop. Rewards in spans count only with the control key.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from ajet.gateway.protocol import BadField, Caller, json_body
from ajet.observe import otlp
from ajet.observe.tracing import by_our_clock
from ajet.schema.errors import MissingDependencyError
from ajet.schema.span import Span
from ajet.system.http_messages import Answer, HttpLimits, HttpRequest, InvalidKeyError, json_answer, presented_key
from ajet.system.http_server import HttpServer

PATH = "/v1/traces"
MAX_BYTES = 4 * 1024 * 1024
"""The limit of one decompressed request. An exporter's batch of 512 spans fits."""
MAX_NODES = 100_000
"""Objects and arrays of one request, or messages within it. An exporter's batch with 90 attributes a span fits."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
INVALID_ARGUMENT = 3
"""A status code of gRPC."""


class Export(NamedTuple):
    """The spans of one request."""

    spans: Sequence[Span]
    refused: int
    """Further spans, for which the episode has no room."""


async def traces(body: bytes, content_type: str, caller: Caller) -> Answer:
    """Keep the spans with the episode."""
    caller.session.check_open()
    kind = kind_of(content_type)
    if kind not in (PROTOBUF, JSON):
        return refused(JSON, 415, f"content-type must be {PROTOBUF} or {JSON}, not {kind!r:.80}")
    if len(body) > MAX_BYTES:
        return refused(kind, 413, f"the body is larger than {MAX_BYTES} bytes: export smaller batches")
    try:
        read = await asyncio.to_thread(read_export, body, kind, caller.session.spans.room)
    except otlp.OtlpError as error:
        return refused(kind, 400, str(error))
    except MissingDependencyError as error:
        return refused(kind, 415, str(error))
    caller.session.check_open()
    caller.session.spans.leave_out(read.refused)
    caller.session.add_spans(by_our_clock(read.spans, time.time()), rewards_count=caller.control)
    return accepted(kind, read.refused)


def kind_of(content_type: str) -> str:
    """The media type without its parameters; `JSON` if none is given."""
    return content_type.partition(";")[0].strip().lower() or JSON


def read_export(body: bytes, content_type: str, room: int) -> Export:
    """At most `room` spans of a request's body. Raises OtlpError, MissingDependencyError."""
    kind = kind_of(content_type)
    if kind not in (PROTOBUF, JSON):
        raise otlp.OtlpError(f"content-type must be {PROTOBUF} or {JSON}, not {kind!r:.80}")
    if kind == PROTOBUF:
        message = otlp.parse_protobuf(body, MAX_NODES)
        spans, count = otlp.read_protobuf(message, room), otlp.count_protobuf(message)
    else:
        try:
            document = json_body(body, MAX_NODES)
        except BadField as error:
            raise otlp.OtlpError(str(error)) from None
        count = otlp.count_json(document)
        spans = otlp.read_json(document, room)
    return Export(spans, count - len(spans))


def accepted(content_type: str, left_out: int) -> Answer:
    """Acknowledge an export, and say how many of its spans were left out."""
    kind = kind_of(content_type)
    why = "the episode keeps no more spans"
    if kind == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(left_out), "errorMessage": why}}
        return json_answer(partial if left_out else {})
    answer = b""
    if left_out:
        service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        partial = service.ExportTracePartialSuccess(rejected_spans=left_out, error_message=why)
        answer = service.ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    return Answer(200, answer, {"content-type": PROTOBUF})


def refused(content_type: str, status: int, message: str) -> Answer:
    """Refuse an export with gRPC's `Status`, as OTLP asks for."""
    kind = JSON if kind_of(content_type) != PROTOBUF else PROTOBUF
    if kind == JSON:
        return json_answer({"code": INVALID_ARGUMENT, "message": message}, status)
    text = message.encode()[:1000]
    return Answer(status, b"\x08\x03\x12" + _varint(len(text)) + text, {"content-type": PROTOBUF})


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128, number // 128])


TOKEN_PATH = "/v3/auth/token"
"""Where an AgentOps client changes its key for a token. Here they are the same."""
LOGS_PATH = "/v4/logs/upload/"
"""Where it sends the program's output, which is accepted and dropped."""
HEALTH_PATH = "/healthz"
MAX_SPANS = 100_000
"""The limit of one request: higher than the number of spans that fit into `MAX_BYTES`."""
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
        try:
            read = await asyncio.to_thread(read_export, request.body, kind, MAX_SPANS)
        except otlp.OtlpError as error:
            return refused(kind, 400, str(error))
        except MissingDependencyError as error:
            return refused(kind, 415, str(error))
        await self._sink(read.spans)
        self.received += len(read.spans)
        return accepted(kind, read.refused)

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
