"""Reading tool calls as models write them: JSON objects, or arguments one by one between tags.

JSON arguments are kept exactly as the model wrote them. Text between tags has no types, so the tool's own schema says
what a value is: a string stays as written, anything else is JSON (or a string, if it isn't JSON).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # public, but not in the stubs
from typing import Any, NoReturn

from ajet.schema.chat import Tool

_SPACE = " \t\r\n"
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
"""Jinja templates write these where JSON has true, false and null; models copy them."""


class Unreadable(Exception):
    """This is not a tool call; the message says why."""


class Incomplete(Unreadable):
    """Not a tool call so far; more text could make it one."""


class NotACall(Unreadable):
    """Ordinary text after all, with nothing wrong with it."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One tool call as a model wrote it."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = ""


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def expect_end(text: str, at: int) -> None:
    """Raise `Unreadable` if anything but white space follows."""
    at = skip_space(text, at)
    if at < len(text):
        raise Unreadable(f"text after the call: {text[at : at + 20]!r}")


# ------------------------------------------------------------ JSON


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_no_constant)
_LENIENT = json.JSONDecoder(parse_constant=_no_constant, strict=False)


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _escape_controls(string: re.Match[str]) -> str:
    return re.sub(r"[\x00-\x1f]", lambda found: json.dumps(found[0])[1:-1], string[0])


def json_value(text: str, at: int) -> tuple[Any, str, int]:
    """The value at `at`, its source, and where it ends. Raw line breaks in strings are accepted, and then escaped."""
    for decoder in (_STRICT, _LENIENT):
        try:
            value, end = decoder.raw_decode(text, at)
            if "\\u" in text[at:end]:
                json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            raise Unreadable("JSON nested too deeply") from None
        except UnicodeEncodeError:
            raise Unreadable("half of a surrogate pair, which no protocol can send") from None
        except ValueError as error:
            problem = error
            continue
        source = text[at:end]
        return value, source if decoder is _STRICT else _STRING.sub(_escape_controls, source), end
    position = getattr(problem, "pos", 0)
    cut = "Unterminated" in str(problem) or position >= len(text.rstrip())
    raise (Incomplete if cut else Unreadable)(f"not JSON: {problem}") from None


def json_object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The object at `at` as key → (value, source), and where it ends. Of two equal keys, the first counts."""
    _, _, end = json_value(text, at)
    fields: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1, False)
        at = skip_space(text, skip_space(text, at) + 1)
        value, source, at = json_value(text, at)
        fields.setdefault(key, (value, source))
        at = skip_space(text, at)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    return fields, end


def json_arguments(text: str, at: int = 0) -> tuple[str, int]:
    """The source of the arguments that begin at `at` (white space aside), and where they end."""
    value, source, end = json_value(text, skip_space(text, at))
    return _arguments_source(value, source), end


def json_calls(body: str, tools: Sequence[Tool] = (), *, separators: str = "") -> list[WrittenCall]:
    """One or more `{"name": …, "arguments": …}`, one after the other or as a list. Raises `Unreadable`."""
    at = skip_space(body, 0)
    if at == len(body):
        raise Unreadable("empty")
    in_list = body[at] == "["
    if in_list:
        at = skip_space(body, at + 1)
    calls: list[WrittenCall] = []
    while at < len(body):
        if in_list and body[at] == "]":
            at = skip_space(body, at + 1)
            in_list = False
            break
        if body[at] != "{":
            raise Unreadable(f"{'text after the call' if calls else 'not a JSON object'}: {body[at : at + 20]!r}")
        fields, at = json_object(body, at)
        calls.append(_call_of(fields))
        at = skip_space(body, at)
        if at < len(body) and (body[at] in separators or (in_list and body[at] == ",")):
            at = skip_space(body, at + 1)
    if in_list:
        raise Incomplete("list not closed")
    expect_end(body, at)
    if not calls:
        raise Unreadable("no call")
    return calls


def _call_of(fields: dict[str, tuple[Any, str]]) -> WrittenCall:
    """An id counts if it precedes the arguments: while they are being streamed, the id can't change any more."""
    name = fields.get("name", fields.get("tool_name", (None, "")))[0]
    if not isinstance(name, str) or not name:
        raise Unreadable('no "name"')
    call_id = ""
    for key, (value, source) in fields.items():
        if key == "id" and isinstance(value, str):
            call_id = value
        elif key in ("arguments", "parameters"):
            return WrittenCall(name, _arguments_source(value, source), call_id)
    raise Unreadable('no "arguments"')


def _arguments_source(value: Any, source: str) -> str:
    """The arguments as the source of a JSON object; an object written inside a string is unpacked."""
    if isinstance(value, str):
        inner, inner_source, end = json_value(value, skip_space(value, 0))
        if isinstance(inner, dict) and skip_space(value, end) == len(value):
            return inner_source
        raise Unreadable("the arguments are a string that does not hold a JSON object")
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Unreadable(f"the arguments are not a JSON object but a {type(value).__name__}")
    return source


# ------------------------------------------------------------ arguments between tags


def tagged_arguments(pattern: re.Pattern[str], text: str, name: str, tools: Sequence[Tool]) -> str:
    """The arguments of a call to `name` as JSON. `pattern` matches one argument, with the groups `key`, `value` and, if
    the family says so itself, `string`: `true` or `false`."""
    properties = properties_of(name, tools)
    return f"{{{', '.join(tagged_pair(found, properties) for found in _all_of(pattern, text))}}}"


def tagged_pair(found: re.Match[str], properties: dict[str, Any]) -> str:
    """One argument as a member of a JSON object."""
    key, is_string = found["key"].strip(), found.groupdict().get("string")
    schema = properties.get(key) if is_string is None else {"type": "string"} if is_string == "true" else None
    value = _typed(found["value"], schema)
    return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _all_of(pattern: re.Pattern[str], text: str) -> Iterable[re.Match[str]]:
    at = 0
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            if text[at:].strip():
                raise Incomplete(f"not an argument: {text[at : at + 30]!r}")
            return
        yield found
        at = found.end()


def python_value(value: Any) -> str:
    """A value written in Python, as JSON. Raises ValueError or TypeError if JSON has no such value."""
    source = json.dumps(value, ensure_ascii=False, allow_nan=False)
    source.encode()  # half of a surrogate pair is none
    return source


def properties_of(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The schemas of a tool's arguments."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """An argument's value, by its schema."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    stripped = text.strip()
    if stripped in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[stripped]
    try:
        value, _, end = json_value(stripped, 0)
    except Unreadable:
        return text
    return value if skip_space(stripped, end) == len(stripped) else text
