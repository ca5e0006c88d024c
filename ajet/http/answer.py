"""What an endpoint gives back, whoever carries it to the client: a status, headers, and a body or a stream of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ajet.schema.errors import EngineOverloadedError, ModelCallError

ANTHROPIC_PATH = "/v1/messages"
RETRY_AFTER_S = 1
"""What an overloaded engine or episode asks clients to wait."""

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """One HTTP response, without the HTTP."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    """Ends a stream whose reader has gone, whether or not reading had begun. On the service loop."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, encode(value), {"content-type": "application/json", **(headers or {})})


def stream_answer(chunks: AsyncIterator[bytes], close: Callable[[], None]) -> Answer:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return Answer(200, chunks, headers, close)


def error_headers(error: ModelCallError) -> dict[str, str]:
    """Official clients retry 409 and 5xx by themselves; here only "too busy" gets better by asking again."""
    if isinstance(error, EngineOverloadedError):
        return {"retry-after": str(RETRY_AFTER_S), "x-should-retry": "true"}
    return {"x-should-retry": "false"}


def error_answer(error: ModelCallError, path: str) -> Answer:
    """An error in the shape of the protocol that is spoken at `path`."""
    body: dict[str, Any] = {"error": openai_error_body(error)}
    if path == ANTHROPIC_PATH:
        body = anthropic_error_body(error)
    return json_answer(body, error.http_status, error_headers(error))


def openai_error_body(error: ModelCallError) -> dict[str, Any]:
    return {
        "message": str(error),
        "type": error.error_type,
        "param": getattr(error, "param", None),
        "code": error.code,
    }


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error_body(error: ModelCallError) -> dict[str, Any]:
    """Anthropic's shape; `code` is ours, for those who want to know more."""
    status = error.http_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}
