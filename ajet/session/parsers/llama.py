"""Llama 3.x: the whole reply is `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>`, more after `;`."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.schema.chat import Tool
from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import Call, NoCall, json_value, read_json_calls, skip_space


def _tagged(body: str, tools: Sequence[Tool]) -> list[Call]:
    return read_json_calls(body, tools, separators=";")


def _bare(body: str, tools: Sequence[Tool]) -> list[Call]:
    """JSON without a name is an answer in JSON, not a broken call."""
    value, _, _ = json_value(body, skip_space(body, 0))
    if not isinstance(value, dict) or "name" not in value:
        raise NoCall("JSON, but no call")
    return read_json_calls(body, tools, separators=";")


LLAMA = ReplyParser(
    "llama3",
    Markup(
        think_open="",
        think_close="",
        blocks=(Block("<|python_tag|>", (), _tagged), Block("{", (), _bare, only_first=True, keep_open=True)),
    ),
)
