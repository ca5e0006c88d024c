"""`Answer`: what a handler returns for a request: a status, headers, and a body or a stream of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """One response, independent of what carries it to the client."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    """Without those that frame the body (content-length, transfer-encoding, connection): the server adds them."""
    close: Callable[[], None] = lambda: None
    """Ends a stream whose reader has gone, whether or not reading had begun. Called on the service loop."""


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, encode(value), {"content-type": "application/json", **(headers or {})})


def server_sent_event(value: Any, name: str = "") -> bytes:
    event = b"data: " + encode(value) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + event if name else event


def event_stream(chunks: AsyncIterator[bytes], close: Callable[[], None]) -> Answer:
    """Server-sent events; `close` ends them."""
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return Answer(200, chunks, headers, close)
