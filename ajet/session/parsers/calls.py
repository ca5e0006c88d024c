"""Tool calls written as JSON, as most families do. The arguments are kept as the model wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # public, but not in the stubs
from typing import Any, NoReturn

from ajet.schema.chat import Tool

_SPACE = " \t\r\n"


class Unreadable(Exception):
    """This is not a tool call; the message says why."""


class Incomplete(Unreadable):
    """Not a tool call as far as it goes; more text could make it one."""


class NoCall(Unreadable):
    """Something else after all: text, and nothing wrong with it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as a model wrote it."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_no_constant)
_LENIENT = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def json_value(text: str, at: int) -> tuple[Any, str, int]:
    """The value at `at`, its source and where it ends. Raw line breaks in strings are forgiven (and then rewritten)."""
    for decoder in (_STRICT, _LENIENT):
        try:
            value, end = decoder.raw_decode(text, at)
        except RecursionError:
            raise Unreadable("JSON nested too deeply") from None
        except ValueError as error:
            problem = error
            continue
        return value, text[at:end] if decoder is _STRICT else json.dumps(value, ensure_ascii=False), end
    position = getattr(problem, "pos", 0)
    cut = "Unterminated" in str(problem) or position >= len(text.rstrip())
    raise (Incomplete if cut else Unreadable)(f"not JSON: {problem}") from None


def json_object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The object at `at` as key → (value, source), and where it ends."""
    _, _, end = json_value(text, at)
    fields: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, False)
        at = skip_space(text, skip_space(text, at) + 1)
        value, source, at = json_value(text, at)
        fields[key] = (value, source)
        at = skip_space(text, at)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    return fields, end


def arguments_source(value: Any, source: str) -> str:
    """The arguments as a JSON object's source; an object written inside a string is taken out of it."""
    if isinstance(value, str):
        inner, inner_source, end = json_value(value, skip_space(value, 0))
        if isinstance(inner, dict) and skip_space(value, end) == len(value):
            return inner_source
        raise Unreadable("arguments are a string that holds no JSON object")
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Unreadable(f"arguments are no JSON object but {type(value).__name__}")
    return source


def call_of(fields: dict[str, tuple[Any, str]], argument_keys: Sequence[str]) -> Call:
    """One `{"name": …, "arguments": {…}}`."""
    name = fields.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name:
        raise Unreadable('no "name"')
    call_id = fields.get("id", ("", ""))[0]
    for key in argument_keys:
        if key in fields:
            arguments = arguments_source(*fields[key])
            return Call(name, arguments, call_id if isinstance(call_id, str) else "")
    raise Unreadable(f'no "{argument_keys[0]}"')


def read_json_calls(body: str, tools: Sequence[Tool] = (), *, separators: str = "") -> list[Call]:
    """One or more JSON calls, one after the other or as a list. Raises `Unreadable`."""
    at = skip_space(body, 0)
    if at == len(body):
        raise Unreadable("empty")
    in_list = body[at] == "["
    if in_list:
        at = skip_space(body, at + 1)
    calls: list[Call] = []
    while at < len(body):
        if in_list and body[at] == "]":
            at = skip_space(body, at + 1)
            in_list = False
            break
        if body[at] != "{":
            raise Unreadable(f"{'text after the call' if calls else 'no JSON object'}: {body[at : at + 20]!r}")
        fields, at = json_object(body, at)
        calls.append(call_of(fields, ("arguments", "parameters")))
        at = skip_space(body, at)
        if at < len(body) and (body[at] in separators or (in_list and body[at] == ",")):
            at = skip_space(body, at + 1)
    if in_list:
        raise Incomplete("list not closed")
    if at != len(body):
        raise Unreadable(f"text after the call: {body[at : at + 20]!r}")
    if not calls:
        raise Unreadable("no call")
    return calls
