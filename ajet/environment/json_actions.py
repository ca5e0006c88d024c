"""Actions described by a JSON schema: shown to the agent, and read from its reply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ajet.environment.spaces import MAX_REPLY, SpaceError, marked_action
from ajet.system.json_schemas import SchemaRefused, breach

OURS_TO_FILL = ("metadata",)
"""Fields that a server adds to every action, and an agent has nothing to say about."""


def action_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action, with their schemas."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: field for name, field in properties.items() if name not in OURS_TO_FILL}


def describe_action(schema: Mapping[str, Any]) -> str:
    """In words: one field is answered by its value alone."""
    fields = action_fields(schema)
    if len(fields) == 1:
        ((name, field),) = fields.items()
        about = field.get("description") if isinstance(field, dict) else None
        return f"{_kind(field)} for {name}" + (f" ({about})" if about else "")
    shape = {"type": "object", "properties": fields, "required": _required(schema)}
    if "$defs" in schema:
        shape["$defs"] = schema["$defs"]
    return f"a JSON object of this JSON schema: {json.dumps(shape, ensure_ascii=False)}"


def read_action(schema: Mapping[str, Any], reply: str) -> dict[str, Any]:
    """The action in a reply. Raises SpaceError, whose message is for the agent."""
    text = marked_action(reply)
    if not text:
        raise SpaceError("the reply is empty")
    fields = action_fields(schema)
    value = _object(text)
    if value is None and len(fields) == 1:
        ((name, field),) = fields.items()
        value = {name: text if _kind(field) == "text" else _parsed(text)}
    if value is None:
        raise SpaceError(f"{text[:60]!r} is not a JSON object")
    try:
        found = breach(schema, value)
    except SchemaRefused as error:
        raise SpaceError(f"the environment's schema of actions can't be applied: {error}") from None
    if found is not None:
        raise SpaceError(found.message[:200])
    return value


def _object(text: str) -> dict[str, Any] | None:
    start, end = text.find("{"), text.rfind("}")
    value = _parsed(text[start : end + 1]) if 0 <= start < end else None
    return value if isinstance(value, dict) else None


def _parsed(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text[:MAX_REPLY])
    except (ValueError, RecursionError):
        return text


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in schema.get("required", []) if name not in OURS_TO_FILL]


def _kind(field: Any) -> str:
    kinds = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
    return kinds.get(str(field.get("type")), "a JSON value") if isinstance(field, dict) else "a JSON value"
