"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]`, and since v11 `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.schema.chat import Tool
from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import (
    Call,
    Incomplete,
    Unreadable,
    arguments_source,
    json_value,
    read_json_calls,
    skip_space,
)

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(body: str, tools: Sequence[Tool]) -> list[Call]:
    if body.lstrip()[:1] in ("[", "{", ""):
        return read_json_calls(body, tools)
    calls: list[Call] = []
    at = 0
    while at < len(body):
        args = body.find(_ARGS, at)
        if args < 0:
            raise Incomplete(f"no {_ARGS} after the name")
        name, _, call_id = body[at:args].strip().partition(_ID)
        if not name or any(character.isspace() for character in name):
            raise Unreadable(f"{name[:40]!r} is no name")
        value, source, at = json_value(body, skip_space(body, args + len(_ARGS)))
        calls.append(Call(name, arguments_source(value, source), call_id))
        at = skip_space(body, at)
        if at < len(body):
            if not body.startswith(_OPEN, at):
                raise Unreadable(f"text after the call: {body[at : at + 20]!r}")
            at += len(_OPEN)
    return calls


MISTRAL = ReplyParser(
    "mistral",
    Markup(think_open="[THINK]", think_close="[/THINK]", blocks=(Block(_OPEN, (), _read),), bare_ids=True),
)
