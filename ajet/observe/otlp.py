"""OpenTelemetry's protocol, OTLP: spans from JSON and protobuf, spans as JSON, and the answer to `POST /v1/traces`.

Input is untrusted: it is validated, and nothing in it is executed. protobuf needs the extra `otel`, JSON needs nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

from ajet.observe.tracing import attributes as names
from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command
from ajet.schema.span import Span, SpanStatus
from ajet.system.http_messages import Answer, InvalidBodyError, json_answer, json_object

PATH = "/v1/traces"
MAX_BYTES = 4 * 1024 * 1024
"""The limit of one decompressed request. An exporter's batch of 512 spans fits."""
MAX_NODES = 100_000
"""Objects and arrays of one request, or messages within it. An exporter's batch with 90 attributes a span fits."""
MAX_SPANS = 100_000
"""Higher than the number of spans that fit into `MAX_BYTES`."""
MAX_RESOURCE = 16_384
"""Characters of a resource's attributes. Each of its spans is kept with all of them."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
INVALID_ARGUMENT = 3
"""A status code of gRPC."""
MAX_DEPTH = 50
"""The maximum nesting of an attribute's value."""
_HEX = re.compile(r"[0-9a-fA-F]{1,64}\Z")
_STATUS = ("UNSET", "OK", "ERROR")
_SCALARS = ("stringValue", "intValue", "doubleValue", "boolValue")
UNKNOWN = "unknown"
"""The rollout and attempt of a span that names none."""


class OtlpError(ValueError):
    """Invalid OTLP. Says what is wrong, and where."""


class _Raw(NamedTuple):
    """A span in the common form of JSON and protobuf."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    status: int
    status_message: str
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    links: list[dict[str, Any]]


# ---------------------------------------------------------------- JSON


def raw_spans(document: Any) -> Iterator[dict[str, Any]]:
    """The unparsed spans of an OTLP JSON document."""
    for item in document if isinstance(document, list) else [document]:
        for resource in objects(item, "resourceSpans", "resource_spans"):
            for scope in objects(resource, "scopeSpans", "scope_spans"):
                yield from objects(scope, "spans")


def objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    """The objects in the list at the first of these keys that exists."""
    if not isinstance(value, dict):
        return []
    found: list[Any] = next((value[key] for key in keys if isinstance(value.get(key), list)), [])
    return [each for each in found if isinstance(each, dict)]


def attributes_of(value: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span, an event or a resource in OTLP JSON."""
    return {str(each.get("key")): any_value(each.get("value")) for each in objects(value, "attributes")}


def any_value(value: Any, depth: int = 0) -> Any:
    """An attribute's value. 64-bit numbers may be texts in JSON."""
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return None
    if isinstance(listed := value.get("arrayValue"), dict):
        inner = listed.get("values")
        return [any_value(each, depth + 1) for each in inner] if isinstance(inner, list) else []
    if isinstance(pairs := value.get("kvlistValue"), dict):
        return {str(each.get("key")): any_value(each.get("value"), depth + 1) for each in objects(pairs, "values")}
    if isinstance(number := value.get("intValue"), str) and re.fullmatch(r"-?\d{1,20}", number):
        return int(number) if -(2**63) <= int(number) < 2**63 else number
    return next((value[name] for name in _SCALARS if name in value), None)


def _in_json(document: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The unparsed spans of a request, each with its resource. Raises OtlpError if it isn't OTLP."""
    if not isinstance(document, dict) or not isinstance(document.get("resourceSpans", []), list):
        raise OtlpError("expected an object with resourceSpans, a list")
    for resource in objects(document, "resourceSpans"):
        described = _resource(attributes_of(resource.get("resource") or {}))
        for scope in objects(resource, "scopeSpans"):
            for raw in objects(scope, "spans"):
                yield raw, described


def _of_json(raw: dict[str, Any]) -> _Raw:
    status = raw.get("status")
    said = status if isinstance(status, dict) else {}
    return _Raw(
        str(raw.get("traceId") or ""),
        str(raw.get("spanId") or ""),
        str(raw.get("parentSpanId") or ""),
        str(raw.get("name") or ""),
        _nanoseconds(raw.get("startTimeUnixNano")),
        _nanoseconds(raw.get("endTimeUnixNano")),
        _code(said.get("code")),
        str(said.get("message") or ""),
        attributes_of(raw),
        [
            {"name": str(event.get("name") or ""), "time": _nanoseconds(event.get("timeUnixNano")) / 1e9}
            | {"attributes": attributes_of(event)}
            for event in objects(raw, "events")
        ],
        [
            {"trace_id": str(link.get("traceId") or ""), "span_id": str(link.get("spanId") or "")}
            | {"attributes": attributes_of(link)}
            for link in objects(raw, "links")
        ],
    )


def _code(value: Any) -> int:
    if isinstance(value, str):
        value = {"STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}.get(value, 0)
    return value if value in (0, 1, 2) else 0


def _nanoseconds(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**64 else 0


# ---------------------------------------------------------------- protobuf


def parse_protobuf(body: bytes, most: int) -> Any:
    """The message in a request's body, with at most `most` messages within it. Raises OtlpError, or
    MissingDependencyError."""
    try:
        service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        decode_error: type[Exception] = import_module("google.protobuf.message").DecodeError
    except ImportError as error:
        raise MissingDependencyError(
            f"OTLP as protobuf needs opentelemetry-proto ({error}): {install_command('otel')}; or have the agent send "
            "JSON (OTEL_EXPORTER_OTLP_PROTOCOL=http/json)"
        ) from None
    try:
        message = service.ExportTraceServiceRequest.FromString(body)
    except decode_error as error:
        raise OtlpError(f"not an ExportTraceServiceRequest: {error}") from None
    if len(body) > 2 * most:  # an empty message takes two bytes
        _bound(message, most)
    return message


def _bound(message: Any, most: int) -> None:
    """Count before anything is read: what is empty costs its sender two bytes, and us a Python object."""
    waiting = [message]
    while waiting:
        for descriptor, value in waiting.pop().ListFields():
            if descriptor.message_type is None:
                continue
            within = (value,) if hasattr(value, "ListFields") else value
            most -= len(within)
            if most < 0:
                raise OtlpError(
                    "the body holds too many resources, spans, attributes and values: export smaller batches"
                )
            waiting.extend(within)


def _in_protobuf(message: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The unread spans of a message, each with its resource."""
    for resource in message.resource_spans:
        described = _resource(_pairs(resource.resource.attributes))
        for scope in resource.scope_spans:
            for raw in scope.spans:
                yield raw, described


def _of_protobuf(raw: Any) -> _Raw:
    return _Raw(
        raw.trace_id.hex(),
        raw.span_id.hex(),
        raw.parent_span_id.hex(),
        raw.name,
        raw.start_time_unix_nano,
        raw.end_time_unix_nano,
        raw.status.code,
        raw.status.message,
        _pairs(raw.attributes),
        [
            {"name": event.name, "time": event.time_unix_nano / 1e9, "attributes": _pairs(event.attributes)}
            for event in raw.events
        ],
        [
            {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": _pairs(link.attributes)}
            for link in raw.links
        ],
    )


def _pairs(pairs: Any, depth: int = 0) -> dict[str, Any]:
    return {pair.key: _proto_value(pair.value, depth) for pair in pairs}


def _proto_value(value: Any, depth: int) -> Any:
    kind = value.WhichOneof("value")
    if kind is None or depth > MAX_DEPTH:
        return None
    if kind == "array_value":
        return [_proto_value(each, depth + 1) for each in value.array_value.values]
    if kind == "kvlist_value":
        return _pairs(value.kvlist_value.values, depth + 1)
    found = getattr(value, kind)
    return found.hex() if isinstance(found, bytes) else found


# ---------------------------------------------------------------- spans


def _resource(attributes: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is too much to keep with each of its spans, the longest first, such as a command line."""
    sizes = {name: len(repr((name, value))) for name, value in attributes.items()}
    if len(sizes) <= names.MAX_ATTRIBUTES and sum(sizes.values()) <= MAX_RESOURCE:
        return attributes
    shortest = sorted(sizes, key=sizes.__getitem__)[: names.MAX_ATTRIBUTES - 1]
    totals = accumulate(sizes[name] for name in shortest)
    kept = {name: attributes[name] for name, total in zip(shortest, totals, strict=True) if total <= MAX_RESOURCE}
    return {**kept, names.CUT: len(attributes) - len(kept)}


def _span(raw: _Raw, resource: dict[str, Any]) -> Span:
    for what, value in (("spanId", raw.span_id), ("traceId", raw.trace_id)):
        if not _HEX.match(value):
            raise OtlpError(f"span {raw.name!r:.100}: {what} must be hexadecimal digits, not {value!r:.80}")
    return Span(
        rollout_id=_id(resource.get(names.ROLLOUT_ID)),
        attempt_id=_id(resource.get(names.ATTEMPT_ID)),
        trace_id=raw.trace_id.lower(),
        span_id=raw.span_id.lower(),
        parent_id=raw.parent_id.lower() or None,
        name=raw.name,
        status=SpanStatus(
            status_code=_STATUS[raw.status] if raw.status in (0, 1, 2) else "UNSET",  # type: ignore[arg-type]
            description=raw.status_message[:1000] or None,
        ),
        attributes=raw.attributes,
        events=tuple(raw.events),
        links=tuple(raw.links),
        start_time=raw.start_ns / 1e9 or None,
        end_time=raw.end_ns / 1e9 or None,
        resource=resource,
    )


def _id(value: Any) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[!-~]{1,200}", value) else UNKNOWN


def to_json(spans: Sequence[Span], resource: Mapping[str, Any], scope: str = "ajet") -> dict[str, Any]:
    """An OTLP JSON document. Spans that describe a resource of their own keep it, beside `resource`."""
    groups: dict[str, list[Span]] = {}
    for span in spans:
        groups.setdefault(repr(sorted(span.resource.items())), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _key_values({**resource, **group[0].resource})},
                "scopeSpans": [{"scope": {"name": scope}, "spans": [_json_span(span) for span in group]}],
            }
            for group in groups.values()
        ]
    }


def _json_span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id or "",
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": _unix_nano(span.start_time),
        "endTimeUnixNano": _unix_nano(span.end_time),
        "attributes": _key_values(span.attributes),
        "status": {"code": _STATUS.index(span.status.status_code), "message": span.status.description or ""},
        "events": [
            {
                "name": str(event.get("name", "")),
                "timeUnixNano": _unix_nano(event.get("time")),
                "attributes": _key_values(_mapping(event.get("attributes"))),
            }
            for event in span.events
        ],
        "links": [
            {
                "traceId": str(link.get("trace_id", "")),
                "spanId": str(link.get("span_id", "")),
                "attributes": _key_values(_mapping(link.get("attributes"))),
            }
            for link in span.links
        ],
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _unix_nano(seconds: Any) -> str:
    known = isinstance(seconds, int | float) and math.isfinite(seconds) and 0 <= seconds < 1e10
    return str(int(seconds * 1e9)) if known else "0"


def _key_values(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _json_value(value)} for key, value in values.items() if value is not None]


def _json_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value} if math.isfinite(value) else {"stringValue": str(value)}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": _key_values(value)}}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_json_value(each) for each in value if each is not None]}}
    return {"stringValue": str(value)}


# ---------------------------------------------------------------- POST /v1/traces


class Export(NamedTuple):
    """The spans of one request."""

    spans: Sequence[Span]
    left_out: int
    """Further spans, for which there is no room."""


class Rejected(NamedTuple):
    """How many spans of a request were not kept, and why."""

    spans: int
    why: str


async def receive(
    body: bytes, content_type: str, room: int, keep: Callable[[Sequence[Span], int], Awaitable[Rejected]]
) -> Answer:
    """Read at most `room` spans off the event loop, and give them to `keep`, with the number of those left out."""
    kind = kind_of(content_type)
    if kind not in (PROTOBUF, JSON):
        return refused(JSON, 415, f"content-type must be {PROTOBUF} or {JSON}, not {kind!r:.80}")
    if len(body) > MAX_BYTES:
        return refused(kind, 413, f"the body is larger than {MAX_BYTES} bytes: export smaller batches")
    try:
        read = await asyncio.to_thread(read_export, body, kind, room)
    except OtlpError as error:
        return refused(kind, 400, str(error))
    except MissingDependencyError as error:
        return refused(kind, 415, str(error))
    return _accepted(kind, await keep(read.spans, read.left_out))


def kind_of(content_type: str) -> str:
    """The media type without its parameters; `JSON` if none is given."""
    return content_type.partition(";")[0].strip().lower() or JSON


def read_export(body: bytes, kind: str, room: int) -> Export:
    """At most `room` spans of a request's body. Raises OtlpError, MissingDependencyError."""
    read: Callable[[Any], _Raw]
    if kind == PROTOBUF:
        found, read = list(_in_protobuf(parse_protobuf(body, MAX_NODES))), _of_protobuf
    else:
        try:
            document = json_object(body, MAX_NODES)
        except InvalidBodyError as error:
            raise OtlpError(str(error)) from None
        found, read = list(_in_json(document)), _of_json
    spans = [_span(read(raw), resource) for raw, resource in found[:room]]
    return Export(spans, len(found) - len(spans))


def _accepted(kind: str, rejected: Rejected) -> Answer:
    if kind == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(rejected.spans), "errorMessage": rejected.why}}
        return json_answer(partial if rejected.spans else {})
    answer = b""
    if rejected.spans:
        service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        partial = service.ExportTracePartialSuccess(rejected_spans=rejected.spans, error_message=rejected.why)
        answer = service.ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    return Answer(200, answer, {"content-type": PROTOBUF})


def refused(content_type: str, status: int, message: str) -> Answer:
    """Refuse an export with gRPC's `Status`, as OTLP asks for."""
    if kind_of(content_type) != PROTOBUF:
        return json_answer({"code": INVALID_ARGUMENT, "message": message}, status)
    text = message.encode()[:1000]
    return Answer(status, b"\x08\x03\x12" + _varint(len(text)) + text, {"content-type": PROTOBUF})


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128, number // 128])
