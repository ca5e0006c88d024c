"""Reading tool calls as models write them: JSON objects, or arguments one by one between tags.

JSON arguments are kept exactly as the model wrote them. Text between tags has no types, so the tool's own schema says
what a value is: a string stays as written, anything else is JSON (or a string, if it isn't JSON).

A scanner reads the calls of a block while they are being written: the name first, then the arguments in pieces. It is
fed the block's text as it grows. It gives out only what the block's reader will say as well, once the block is whole;
what it doesn't recognise comes whole at the end. So what is streamed adds up to what is parsed, unless the block turns
out to be no call: the pieces of a call that was begun can't be taken back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # public, but not in the stubs
from typing import Any, NoReturn

from ajet.schema.chat import Tool

_SPACE = " \t\r\n"
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
"""Jinja templates write these where JSON has true, false and null; models copy them."""


class Unreadable(Exception):
    """This is not a tool call; the message says why."""


class Incomplete(Unreadable):
    """What was read isn't a tool call yet; more text could make it one."""


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


_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _escape_controls(string: re.Match[str]) -> str:
    return re.sub(r"[\x00-\x1f]", lambda found: json.dumps(found[0])[1:-1], string[0])


def json_value(text: str, at: int) -> tuple[Any, str, int]:
    """The value at `at`, its source, and where it ends. Raw line breaks in strings are accepted, and then escaped."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        if "\\u" in text[at:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Unreadable("JSON nested too deeply") from None
    except UnicodeEncodeError:
        raise Unreadable("half of a surrogate pair, which no protocol can send") from None
    except ValueError as error:
        cut = "Unterminated" in str(error) or getattr(error, "pos", 0) >= len(text.rstrip())
        raise (Incomplete if cut else Unreadable)(f"not JSON: {error}") from None
    return value, _STRING.sub(_escape_controls, text[at:end]), end


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
    members: list[str] = []
    at = 0
    while found := pattern.match(text, at):
        members.append(tagged_pair(found, properties))
        at = found.end()
    if text[at:].strip():
        raise Incomplete(f"not an argument: {text[at : at + 30]!r}")
    return f"{{{', '.join(members)}}}"


def tagged_pair(found: re.Match[str], properties: dict[str, Any]) -> str:
    """One argument as a member of a JSON object."""
    key, is_string = found["key"].strip(), found.groupdict().get("string")
    schema = properties.get(key) if is_string is None else {"type": "string"} if is_string == "true" else None
    value = _typed(found["value"], schema)
    return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


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


# ------------------------------------------------------------ while they are written

LONGEST_HEAD = 1000
"""Characters within which a call's name and the beginning of its arguments must have been recognised."""


@dataclass(slots=True)
class ScannedCall:
    """A call that is being written."""

    name: str
    id: str = ""
    arguments: list[str] = field(default_factory=list)
    """The pieces of a JSON object; tags that are still open leave its last brace out."""


_OUTSIDE = re.compile(r'[{\["]|[}\]]|[\s0-9a-zA-Z:,+\-.]+')
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+|\\.|"|[\x00-\x1f]', re.DOTALL)

NameOf = Callable[[re.Match[str]], tuple[str, str]]
"""The name and the id of the call whose head matched."""

_NAME = r'"((?:[^"\\\x00-\x1f]|\\[^u])+)"'
"""A name. One with numbered characters comes whole with its call: they may be none."""
_NUMBER = r'(?:"tool_call_id"\s*:\s*"?\d*"?\s*,\s*)?'
JSON_CALL = (
    r"\{\s*" + _NUMBER + r'"(?:name|tool_name)"\s*:\s*' + _NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def json_string(found: re.Match[str]) -> tuple[str, str]:
    """A name inside JSON."""
    name = found[1]
    return (json.loads(f'"{name}"') if "\\" in name else name), ""


def group_name(found: re.Match[str]) -> tuple[str, str]:
    """The first of the groups that matched."""
    return next(group for group in found.groups() if group), ""


class JsonScanner:
    """Calls whose arguments are JSON. `first` matches what precedes the first call's arguments in a block, `further`
    what stands between one call's arguments and the next one's. Raw line breaks in strings are escaped."""

    def __init__(
        self,
        _tools: Sequence[Tool],
        first: str = r"\s*\[?\s*" + JSON_CALL,
        further: str | None = r"\s*\}\s*[,;]?\s*" + JSON_CALL,
        name_of: NameOf = json_string,
    ) -> None:
        """By default, it reads `{"name": …, "arguments": {…}}`, or a list of it."""
        self.calls: list[ScannedCall] = []
        self._head: str | None = first
        """None: nothing more is recognised."""
        self._further = further
        self._name_of = name_of
        self._text = ""
        self._in_arguments = False
        self._in_string = False
        self._depth = 0

    def feed(self, text: str) -> None:
        self._text += text
        while self._head is not None and (self._in_arguments or self._begin()):
            self._take_arguments()
            if self._in_arguments:
                return

    def _begin(self) -> bool:
        assert self._head is not None
        found = re.match(self._head, self._text)
        if found is None:
            if len(self._text) > LONGEST_HEAD:
                self._head = None
            return False
        self.calls.append(ScannedCall(*self._name_of(found)))
        self._text = self._text[found.end() :]
        self._in_arguments = True
        return True

    def _take_arguments(self) -> None:
        pieces: list[str] = []
        at = 0
        while at < len(self._text) and self._in_arguments:
            found = (_INSIDE if self._in_string else _OUTSIDE).match(self._text, at)
            if found is None:  # an escape that isn't complete yet, or no JSON
                if not self._in_string:
                    self._head = None
                break
            pieces.append(self._take(found[0]))
            at = found.end()
        self._text = self._text[at:]
        if pieces:
            self.calls[-1].arguments.append("".join(pieces))

    def _take(self, token: str) -> str:
        if self._in_string:
            self._in_string = token != '"'
            return json.dumps(token)[1:-1] if token < " " else token
        if token == '"':
            self._in_string = True
        elif token in "{[":
            self._depth += 1
        elif token in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._in_arguments, self._head = False, self._further
        return token


class ArgumentScanner:
    """Calls whose arguments come one by one; each is a piece. `first` and `further` match what precedes the arguments
    of a block's first call, and of those that follow."""

    def __init__(self, first: str, further: str) -> None:
        self.calls: list[ScannedCall] = []
        self._first, self._further = first, further
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text
        while self._begin() or self._take_argument():
            pass

    def _begin(self) -> bool:
        found = re.match(self._further if self.calls else self._first, self._text)
        if found is None:
            return False
        if self.calls:
            self.calls[-1].arguments.append("}")
        self._text = self._text[found.end() :]
        self.calls.append(ScannedCall(found[1], arguments=["{"]))
        return True

    def _take_argument(self) -> bool:
        argument = self._argument() if self.calls else None
        if argument is None:
            return False
        piece, end = argument
        self._text = self._text[end:]
        arguments = self.calls[-1].arguments
        arguments.append((", " if len(arguments) > 1 else "") + piece)
        return True

    def _argument(self) -> tuple[str, int] | None:
        """The next argument as a member of a JSON object, and where it ends. None: it isn't there yet."""
        raise NotImplementedError


class TagScanner(ArgumentScanner):
    """Calls whose arguments stand between tags."""

    def __init__(
        self, tools: Sequence[Tool], *, first: str, further: str = r"(?!)", argument: re.Pattern[str], close: str
    ) -> None:
        """`further`: by default nothing, of families whose blocks hold one call. `close`: what ends an argument."""
        super().__init__(first, further)
        self._pattern = argument
        self._close = close
        self._tools = tools

    def _argument(self) -> tuple[str, int] | None:
        found = self._pattern.match(self._text) if self._close in self._text else None
        if found is None:
            return None
        return tagged_pair(found, properties_of(self.calls[-1].name, self._tools)), found.end()


# ------------------------------------------------------------ arguments in Python

_PYTHON_HEAD = r"\s*+\[?\s*+([A-Za-z_][A-Za-z0-9_.]*)\("
_PYTHON_FURTHER = r"\s*\)\s*,\s*([A-Za-z_][A-Za-z0-9_.]*)\("
_PYTHON_KEY = re.compile(r"\s*,?\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*")
_PYTHON_TOKEN = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|[(\[{]|[)\]}]|,|[^'"()\[\]{},#]+""", re.DOTALL)


class PythonScanner(ArgumentScanner):
    """Calls written as Python, with named arguments."""

    def __init__(self, _tools: Sequence[Tool]) -> None:
        super().__init__(_PYTHON_HEAD, _PYTHON_FURTHER)
        self._broken = False

    def feed(self, text: str) -> None:
        if any(mark in text for mark in "(,)"):
            super().feed(text)
        else:
            self._text += text

    def _argument(self) -> tuple[str, int] | None:
        found = None if self._broken else _PYTHON_KEY.match(self._text)
        end = None if found is None else self._end_of_value(found.end())
        if found is None or end is None:
            return None
        try:
            value = ast.literal_eval(self._text[found.end() : end].strip())
            return f"{json.dumps(found[1])}: {python_value(value)}", end
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            self._broken = True
            return None

    def _end_of_value(self, at: int) -> int | None:
        """Where the value that begins at `at` ends: before a comma or the call's closing bracket."""
        depth = 0
        while at < len(self._text):
            found = _PYTHON_TOKEN.match(self._text, at)
            if found is None:
                return None
            if depth == 0 and found[0] in (",", ")"):
                return at
            depth += (found[0] in "([{") - (found[0] in ")]}")
            at = found.end()
        return None


CallScanner = JsonScanner | ArgumentScanner
MakeScanner = Callable[[Sequence[Tool]], CallScanner]
