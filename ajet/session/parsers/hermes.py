"""Hermes and Qwen (2.5, 3): `<think>…</think>`, text, `<tool_call>{"name": …, "arguments": …}</tool_call>` a call."""

from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import read_json_calls

HERMES = ReplyParser("hermes", Markup(blocks=(Block("<tool_call>", ("</tool_call>",), read_json_calls),)))
