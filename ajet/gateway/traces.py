"""`POST /v1/traces`: OpenTelemetry spans of an episode, as OTLP protobuf or JSON.

Sizes are checked first; reading happens off the service loop. Rewards in spans count only with the control key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import msgspec

from ajet.gateway.caller import Caller
from ajet.observe.tracing import otlp
from ajet.observe.tracing.attributes import by_our_clock
from ajet.schema.errors import MissingDependencyError
from ajet.schema.span import Span
from ajet.system.http_messages import Answer, json_answer

PATH = "/v1/traces"
MAX_BYTES = 4 * 1024 * 1024
"""Of one request, decompressed: more than an exporter's batch of 512 spans."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
INVALID_ARGUMENT = 3
"""Of gRPC's codes."""


class Export(NamedTuple):
    """What was in a request."""

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
    """`JSON`, `PROTOBUF`, or whatever it is."""
    return content_type.partition(";")[0].strip().lower() or JSON


def read_export(body: bytes, content_type: str, room: int) -> Export:
    """At most `room` spans of a request's body. Raises OtlpError, MissingDependencyError."""
    kind = kind_of(content_type)
    if kind not in (PROTOBUF, JSON):
        raise otlp.OtlpError(f"content-type must be {PROTOBUF} or {JSON}, not {kind!r:.80}")
    if kind == PROTOBUF:
        message = otlp.parse_protobuf(body)
        spans, count = otlp.read_protobuf(message, room), otlp.count_protobuf(message)
    else:
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise otlp.OtlpError(f"the body is not JSON: {error}") from None
        count = otlp.count_json(document)
        spans = otlp.read_json(document, room)
    return Export(spans, count - len(spans))


def accepted(content_type: str, left_out: int) -> Answer:
    """All spans but some were kept."""
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
    """gRPC's `Status`, as OTLP asks for."""
    kind = JSON if kind_of(content_type) != PROTOBUF else PROTOBUF
    if kind == JSON:
        return json_answer({"code": INVALID_ARGUMENT, "message": message}, status)
    text = message.encode()[:1000]
    return Answer(status, b"\x08\x03\x12" + _varint(len(text)) + text, {"content-type": PROTOBUF})


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128, number // 128])
