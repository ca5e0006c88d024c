"""Requests as data: checked before they leave this process, or before a store in this process gets them.

JSON knows no NaN and no infinity. A number that would become null on its way is refused instead.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from ajet.store.records import ProtocolInfo
from ajet.store.requests import OPERATIONS, PROTOCOL, StoreError, StoreOperation, StoreRequest

T = TypeVar("T")
PATH_PREFIX = "/v1/store/"
PROTOCOL_HEADER = "x-ajet-protocol"
BATCH_PATH = PATH_PREFIX + "batch"
_REFUSED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, NotImplementedError, RecursionError)

_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value)).encode
_encode_json = msgspec.json.Encoder(enc_hook=lambda value: _plain(value)).encode
_DECODERS: dict[type[StoreRequest[Any]], Any] = {
    operation.request: msgspec.msgpack.Decoder(operation.request).decode for operation in OPERATIONS
}
_NOT_FINITE = re.compile(b"\xcb[\x7f\xff]")
"""How NaN, infinities and the very largest numbers begin in msgpack. Other bytes may look so, too."""


def checked_copy(request: StoreRequest[T]) -> StoreRequest[T]:
    """Return the request as a store would get it over HTTP. Raises a StoreError if it isn't valid."""
    kind = type(request)
    try:
        data = _encode(request)
        copy: StoreRequest[T] = _DECODERS[kind](data)
    except _REFUSED as error:
        raise StoreError(f"{kind.__name__}: {error}") from None
    _check_finite(data, kind.__name__)
    return copy


def as_json(request: StoreRequest[Any]) -> bytes:
    """Encode a request for HTTP. The server checks the rest."""
    kind = type(request)
    try:
        _check_finite(_encode(request), kind.__name__)
        return _encode_json(request)
    except _REFUSED as error:
        raise StoreError(f"{kind.__name__}: {error}") from None


def _check_finite(data: bytes, where: str) -> None:
    if _NOT_FINITE.search(data):
        _refuse_not_finite(msgspec.msgpack.decode(data), where)


def _refuse_not_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{where} is {value}: a store keeps finite numbers only")
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_not_finite(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_not_finite(inner, f"{where}[{index}]")


def _plain(value: Any) -> Any:
    """Turn values of numpy and torch, and pydantic models, into data."""
    for method in ("tolist", "model_dump"):
        if callable(found := getattr(value, method, None)):
            return found()
    raise NotImplementedError(f"{type(value).__name__} is not data that a store can keep")


# ---------------------------------------------------------------- HTTP


class ErrorDetail(msgspec.Struct):
    code: str
    message: str


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


class BatchItem(msgspec.Struct):
    """One of several small requests that come together."""

    request: str
    """Its path below `/v1/store/`."""
    body: msgspec.Raw


class BatchOutcome(msgspec.Struct, omit_defaults=True):
    """What became of it: an answer, or an error."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorDetail | None = None


@cache
def document() -> bytes:
    """The OpenAPI document, as JSON."""
    types: list[Any] = [ErrorAnswer, ProtocolInfo]
    for operation in OPERATIONS:
        types += [operation.request, operation.answer]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    error, info, *pairs = schemas
    paths: dict[str, Any] = {
        "/healthz": {"get": _description("Whether the server is up.", None, {"type": "object"}, error)},
        "/v1/store": {"get": _description("The server's version, and what the key may do.", None, info, error)},
    }
    item = {"properties": {"request": {"type": "string"}, "body": {}}, "required": ["request", "body"]}
    outcome = {"properties": {"answer": {}, "error": {"$ref": "#/components/schemas/ErrorDetail"}}}
    items, outcomes = ({"type": "array", "items": {"type": "object", **one}} for one in (item, outcome))
    together = _description("Several small requests, each with its own outcome.", items, outcomes, error)
    paths[BATCH_PATH] = {"post": together}
    for index, operation in enumerate(OPERATIONS):
        request, answer = pairs[2 * index : 2 * index + 2]
        paths[PATH_PREFIX + operation.path] = {
            "post": {
                "operationId": operation.request.__name__,
                "description": _roles(operation),
                **_description(operation.summary, request, answer, error),
            }
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "AgentJet rollout store", "version": str(PROTOCOL)},
            "security": [{"key": []}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _description(summary: str, request: Any, answer: Any, error: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "Refused.", "content": {"application/json": {"schema": error}}},
        },
    }
    if request is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return described


def _roles(operation: StoreOperation) -> str:
    keys = f"For keys of: {', '.join(sorted(operation.roles))}."
    return f"{keys} A runner's key: for what was claimed with it." if operation.runner_owns else keys
