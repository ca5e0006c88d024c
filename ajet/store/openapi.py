"""The OpenAPI document of a store's server, made from the requests themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from ajet.store.records import ProtocolInfo
from ajet.store.requests import OPERATIONS, PROTOCOL, Operation

PATH_PREFIX = "/v1/store/"
PROTOCOL_HEADER = "x-ajet-protocol"


class ErrorDetail(msgspec.Struct):
    code: str
    message: str


class ErrorAnswer(msgspec.Struct):
    """Every error."""

    error: ErrorDetail


@cache
def document() -> bytes:
    """As JSON."""
    types = [ErrorAnswer, ProtocolInfo]
    for operation in OPERATIONS:
        types += [operation.request, operation.answer]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    error, info, *pairs = schemas
    paths: dict[str, Any] = {
        "/healthz": {"get": _description("Whether the server is up.", None, {"type": "object"}, error)},
        "/v1/store": {"get": _description("Whom one talks to, and what the key may do.", None, info, error)},
    }
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


def _roles(operation: Operation) -> str:
    keys = f"For keys of: {', '.join(sorted(operation.roles))}."
    return f"{keys} A runner's key: for what was claimed with it." if operation.runner_owns else keys
