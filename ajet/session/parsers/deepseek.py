"""DeepSeek V3, R1 (`function<｜tool▁sep｜>name` and fenced JSON) and V3.1 (`name<｜tool▁sep｜>{…}`)."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.schema.chat import Tool
from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import Call, Incomplete, Unreadable, arguments_source, json_value, skip_space

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def _read(body: str, tools: Sequence[Tool]) -> list[Call]:
    head, separator, rest = body.partition(_SEPARATOR)
    if not separator:
        raise Incomplete(f"no {_SEPARATOR}")
    name = head.strip()
    if name == "function" and _FENCE in rest:
        name, _, rest = rest.partition(_FENCE)
        name, rest = name.strip(), rest.removeprefix("json")
    if not name or any(character.isspace() for character in name):
        raise Unreadable(f"{name[:40]!r} is no name")
    value, source, at = json_value(rest, skip_space(rest, 0))
    left = rest[at:].strip()
    if left not in ("", _FENCE):
        raise Unreadable(f"text after the call: {left[:20]!r}")
    return [Call(name, arguments_source(value, source))]


DEEPSEEK = ReplyParser(
    "deepseek",
    Markup(
        blocks=(Block("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), _read),),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
)
