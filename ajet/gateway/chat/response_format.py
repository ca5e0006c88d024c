"""`response_format`: requested from the model in words, and checked. Never forced: a reply stays as the policy sampled
it.

The format is added to the system message, so conversations that keep it stay one growing prompt. A reply that violates
it is returned as it is; `ChatReply.malformed` says how it does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from ajet.schema.chat import Message
from ajet.schema.errors import InvalidRequestError
from ajet.system.json_schemas import SchemaRefused, SchemaTooSlow, breach, check_schema, on_loop


class ResponseFormat:
    """A checked `response_format`."""

    def __init__(self, given: dict[str, Any]) -> None:
        """Raises InvalidRequestError. `check` has still to look at the schema."""
        self.kind = given.get("type")
        self.too_slow = False
        """The schema took too long to apply."""
        self._schema: dict[str, Any] | None = None
        if self.kind not in ("text", "json_object", "json_schema"):
            raise InvalidRequestError("response_format.type must be text, json_object or json_schema")
        if self.kind == "json_schema":
            named = given.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequestError("response_format.json_schema needs a schema (object)")
            self._schema = schema

    def instruct(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the format requested at the end of the system message."""
        if self.kind == "text":
            return list(messages)
        first, *rest = messages
        if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n\n{self._wanted}"}, *rest]
        return [{"role": "system", "content": self._wanted}, *messages]

    @cached_property
    def _wanted(self) -> str:
        if self._schema is None:
            return "Answer with JSON only."
        schema = json.dumps(self._schema, ensure_ascii=False)
        return f"Answer with JSON only, valid under this JSON schema:\n{schema}"

    async def check(self) -> None:
        """Raises InvalidRequestError if the schema isn't one."""
        if self._schema is None:
            return
        try:
            await on_loop(self._check)
        except SchemaRefused as error:
            self.too_slow = isinstance(error, SchemaTooSlow)
            raise InvalidRequestError(
                f"response_format.json_schema.schema is not a JSON schema: {error!s:.200}"
            ) from None

    def _check(self) -> None:
        """On a thread, with what else takes long."""
        check_schema(self._schema or {})
        _ = self._wanted

    async def violation(self, message: Message) -> str:
        """How a reply violates the format, or an empty string. Tool calls are exempt."""
        if self.kind == "text" or message.get("tool_calls"):
            return ""
        try:
            value = msgspec.json.decode(message.get("content") or "")
        except (msgspec.DecodeError, RecursionError) as error:
            return f"response_format: not JSON: {error}"
        if self._schema is None:
            return "" if isinstance(value, dict) else "response_format: not a JSON object"
        try:
            found = await on_loop(breach, self._schema, value)
        except SchemaRefused as problem:
            self.too_slow = isinstance(problem, SchemaTooSlow)
            return f"response_format: the schema can't be applied: {problem!s:.200}"
        return f"response_format: {found.path}: {found.message[:200]}" if found is not None else ""
