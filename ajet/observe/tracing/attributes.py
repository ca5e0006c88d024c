"""Attributes: any Python value as JSON, nested mappings as dotted names and back, and the limits of one span."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ajet.schema.printable import encodable
from ajet.schema.span import Span

MAX_TEXT = 16_384
"""Characters of one text; the rest is cut, and the cut is said."""
MAX_ATTRIBUTES = 256
"""Of one span, and of each of its events and links."""
MAX_EVENTS = 64
"""Events of one span, and links."""
MAX_DEPTH = 20
CUT = "ajet.attributes_left_out"
"""How many attributes of a span were left out."""


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON. Objects that JSON doesn't know become their `repr`, long texts are cut."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, int):
        if value.bit_length() < 64:
            return int(value)
        return str(value) if value.bit_length() < 10_000 else "a huge number"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {_text(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    for method in ("model_dump", "tolist"):  # pydantic; numpy and torch
        if callable(found := getattr(value, method, None)) and not isinstance(value, type):
            return plain(found(), depth + 1)
    return _text(_repr(value))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings under dotted names; lists of mappings or lists under their index, others as they are."""
    return dict(_flat(plain(values), prefix)) if values else {}


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What `flat` took apart, of the names below `prefix`. Numbers as names stay names: lists are not told from
    mappings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not name.startswith(prefix):
            continue
        *path, last = name[len(prefix) :].strip(".").split(".")
        place = found
        for part in path:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {"": inner}
            place = inner
        place[last] = value
    return found


def bounded(span: Span) -> Span:
    """A span within the limits of one, as JSON throughout."""
    return replace(
        span,
        name=span.name[:500],
        attributes=_few(span.attributes),
        events=tuple(_few(event) for event in span.events[:MAX_EVENTS]),
        links=tuple(_few(link) for link in span.links[:MAX_EVENTS]),
        resource=_few(span.resource),
    )


def _few(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {_text(str(name))[:500]: plain(value) for name, value in list(values.items())[:MAX_ATTRIBUTES]}
    return kept if len(values) <= MAX_ATTRIBUTES else {**kept, CUT: len(values) - MAX_ATTRIBUTES}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}.{index}" if name else str(index))
    else:
        yield name, value


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"
    return encodable(text)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the user's own class: it must not end what it is used in
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
