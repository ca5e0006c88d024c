"""`shorten`, `as_text` and `describe_error`: texts for the model that are never too long and always plain text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

ERROR_CHARS = 2000
"""How much of an exception's message is kept."""


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of `text`, if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text) - limit} of {len(text)} characters left out …]\n"
    head = limit // 2
    return text[:head] + note + text[len(text) - (limit - head) :]


def decode(content: bytes) -> str:
    """Output of a program as text. What isn't UTF-8 is replaced; binary data is only described."""
    if b"\0" in content[:8192]:
        return f"[{len(content)} bytes of binary data]"
    return content.decode("utf-8", errors="replace")


def as_text(value: Any) -> str:
    """What a user's tool returned, as the model reads it: text as it is, everything else as JSON."""
    if value is None:
        return "done"
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value))
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False, default=safe_repr)
    return text.encode("utf-8", errors="replace").decode()  # half a surrogate pair can't be sent


def plain(value: Any) -> Any:
    """Pydantic models (also inside lists and dicts) as plain values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def safe_repr(value: Any) -> str:
    """`repr(value)`, even if that raises."""
    return _guarded(lambda: repr(value), value)


def describe_error(error: BaseException) -> str:
    """`ValueError: what it says`, even if an exception's own `__str__` raises or returns megabytes."""
    text = shorten(_guarded(lambda: str(error), error), ERROR_CHARS)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _guarded(text: Callable[[], str], value: Any) -> str:
    try:
        return text()
    except Exception as error:  # noqa: BLE001 - a user's `__repr__` or `__str__` may raise anything
        return f"[a {type(value).__name__} that can't be shown: {type(error).__name__}]"
