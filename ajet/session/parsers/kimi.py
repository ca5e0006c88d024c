"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.schema.chat import Tool
from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import Call, Incomplete, Unreadable, arguments_source, json_value, skip_space

_ARGUMENTS = "<|tool_call_argument_begin|>"


def _read(body: str, tools: Sequence[Tool]) -> list[Call]:
    call_id, separator, rest = body.partition(_ARGUMENTS)
    if not separator:
        raise Incomplete(f"no {_ARGUMENTS}")
    call_id = call_id.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0]
    if not name:
        raise Unreadable(f"{call_id[:40]!r} is not functions.<name>:<number>")
    value, source, at = json_value(rest, skip_space(rest, 0))
    if rest[at:].strip():
        raise Unreadable(f"text after the call: {rest[at : at + 20]!r}")
    return [Call(name, arguments_source(value, source), call_id)]


KIMI = ReplyParser(
    "kimi",
    Markup(
        blocks=(Block("<|tool_call_begin|>", ("<|tool_call_end|>",), _read),),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
)
