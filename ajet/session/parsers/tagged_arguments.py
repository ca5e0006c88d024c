"""Tool calls whose arguments stand between tags, one by one, as plain text: Qwen3-Coder and GLM.

Text has no types, so the tool's own schema says what a value is: a string stays as it is written, anything else is
JSON (or a string, if it is none).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ajet.schema.chat import Tool
from ajet.session.parsers.base import Block, Markup, ReplyParser
from ajet.session.parsers.calls import Call, Incomplete, Unreadable, json_value, skip_space

_PYTHON = {"True": True, "False": False, "None": None}
"""Templates in Jinja write these where JSON has true, false and null; models copy them."""

_QWEN_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _properties(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _value(text: str, schema: Any) -> Any:
    """An argument by its schema."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    stripped = text.strip()
    if kind != "string" and stripped in _PYTHON:
        return _PYTHON[stripped]
    try:
        value, _, end = json_value(stripped, 0)
    except Unreadable:
        return text
    return value if skip_space(stripped, end) == len(stripped) else text


def _arguments(pairs: Iterable[tuple[str, str]], name: str, tools: Sequence[Tool]) -> str:
    properties = _properties(name, tools)
    values = {key.strip(): _value(text, properties.get(key.strip())) for key, text in pairs}
    return json.dumps(values, ensure_ascii=False)


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """All of `text` as key and value, again and again."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            if text[at:].strip():
                raise Incomplete(f"not an argument: {text[at : at + 30]!r}")
            break
        pairs.append((found[1], found[2]))
        at = found.end()
    return pairs


def _read_qwen(body: str, tools: Sequence[Tool]) -> list[Call]:
    found = _QWEN_CALL.fullmatch(body)
    if found is None:
        raise (Incomplete if "</function>" not in body else Unreadable)("no <function=name>…</function>")
    return [Call(found[1], _arguments(_pairs(_QWEN_PARAMETER, found[2]), found[1], tools))]


def _read_bare_qwen(body: str, tools: Sequence[Tool]) -> list[Call]:
    return _read_qwen(body + "</function>", tools)


def _read_glm(body: str, tools: Sequence[Tool]) -> list[Call]:
    found = _GLM_NAME.match(body)
    if found is None:
        raise Unreadable("no name")
    return [Call(found[1], _arguments(_pairs(_GLM_ARGUMENT, body[found.end() :]), found[1], tools))]


QWEN_XML = ReplyParser(
    "qwen_xml",
    Markup(
        blocks=(
            Block("<tool_call>", ("</tool_call>",), _read_qwen),
            # these models often leave out the outer tag
            Block("<function=", ("</function>",), _read_bare_qwen, keep_open=True),
        ),
        noise=("</tool_call>",),
    ),
)
GLM = ReplyParser("glm", Markup(blocks=(Block("<tool_call>", ("</tool_call>",), _read_glm),)))
