"""Reads tool calls while they are being written: the name first, then their arguments in pieces.

A `CallScanner` is fed a block's text as it grows. It gives out only what the block's reader will say as well, once the
block is whole; what it doesn't recognise comes whole at the end. So what is streamed adds up to what is parsed, unless
the block turns out to be no call: the pieces of a call that was begun can't be taken back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ajet.gateway.chat.tool_calls import properties_of, python_value, tagged_pair
from ajet.schema.chat import Tool

LONGEST_HEAD = 1000
"""Characters within which a call's name and the beginning of its arguments must have been recognised."""


@dataclass(slots=True)
class ScannedCall:
    """A call that is being written."""

    name: str
    id: str = ""
    arguments: list[str] = field(default_factory=list)
    """The pieces of a JSON object; tags that are still open leave its last brace out."""


class CallScanner(Protocol):
    """Reads the calls of one block."""

    calls: list[ScannedCall]

    def feed(self, text: str) -> None:
        """Take the next piece of the block's text."""
        ...


MakeScanner = Callable[[Sequence[Tool]], CallScanner]

# ------------------------------------------------------------ arguments in JSON

_OUTSIDE = re.compile(r'[{\["]|[}\]]|[\s0-9a-zA-Z:,+\-.]+')
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+|\\.|"|[\x00-\x1f]', re.DOTALL)


class JsonObject:
    """The source of one JSON object, as it comes. Raw line breaks in strings are escaped."""

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> tuple[str, int]:
        """What the text adds to the object, and how much of the text was used."""
        pieces: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            found = (_INSIDE if self._in_string else _OUTSIDE).match(text, at)
            if found is None:  # an escape that isn't complete yet, or no JSON
                self.broken = not self._in_string
                break
            pieces.append(self._take(found[0]))
            at = found.end()
        return "".join(pieces), at

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
            self.ended = self._depth == 0
        return token


NameOf = Callable[[re.Match[str]], tuple[str, str]]
"""The name and the id of the call whose head matched."""


class JsonScanner:
    """Calls whose arguments are JSON. `first` matches what precedes the first call's arguments in a block, `further`
    what stands between one call's arguments and the next one's."""

    def __init__(self, first: re.Pattern[str], further: re.Pattern[str] | None, name_of: NameOf) -> None:
        self.calls: list[ScannedCall] = []
        self._head: re.Pattern[str] | None = first
        self._further = further
        self._name_of = name_of
        self._text = ""
        self._object: JsonObject | None = None

    def feed(self, text: str) -> None:
        self._text += text
        while self._head is not None and (self._object is not None or self._begin()):
            assert self._object is not None
            piece, used = self._object.feed(self._text)
            self._text = self._text[used:]
            if piece:
                self.calls[-1].arguments.append(piece)
            if not self._object.ended:
                if self._object.broken:
                    self._head = None
                return
            self._object = None
            self._head = self._further

    def _begin(self) -> bool:
        assert self._head is not None
        found = self._head.match(self._text)
        if found is None:
            if len(self._text) > LONGEST_HEAD:
                self._head = None
            return False
        self.calls.append(ScannedCall(*self._name_of(found)))
        self._text = self._text[found.end() :]
        self._object = JsonObject()
        return True


_STRING = r'"((?:[^"\\\x00-\x1f]|\\[^u])+)"'
"""A name. One with numbered characters comes whole with its call: they may be none."""
_NUMBER = r'(?:"tool_call_id"\s*:\s*"?\d*"?\s*,\s*)?'
JSON_CALL = (
    r"\{\s*" + _NUMBER + r'"(?:name|tool_name)"\s*:\s*' + _STRING + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def json_string(found: re.Match[str]) -> tuple[str, str]:
    """A name inside JSON."""
    name = found[1]
    return (json.loads(f'"{name}"') if "\\" in name else name), ""


def group_name(found: re.Match[str]) -> tuple[str, str]:
    """The first of the groups that matched."""
    return next(group for group in found.groups() if group), ""


def json_scanner(
    first: str = r"\s*\[?\s*" + JSON_CALL,
    further: str | None = r"\s*\}\s*[,;]?\s*" + JSON_CALL,
    name_of: NameOf = json_string,
) -> MakeScanner:
    """Makes scanners of calls whose arguments are JSON; by default `{"name": …, "arguments": {…}}`, or a list of it."""
    first_, further_ = re.compile(first), None if further is None else re.compile(further)
    return lambda _tools: JsonScanner(first_, further_, name_of)


JSON_SCANNER = json_scanner()

# ------------------------------------------------------------ arguments between tags


class TagScanner:
    """Calls whose arguments stand between tags; each argument is a piece."""

    def __init__(
        self,
        heads: tuple[re.Pattern[str], re.Pattern[str]],
        argument: re.Pattern[str],
        close: str,
        tools: Sequence[Tool],
    ) -> None:
        self.calls: list[ScannedCall] = []
        self._head, self._further = heads
        self._argument = argument
        self._close = close
        self._tools = tools
        self._properties: dict[str, Any] = {}
        self._text = ""

    def feed(self, text: str) -> None:
        self._text += text
        while self._begin() or self._take_argument():
            pass

    def _begin(self) -> bool:
        found = (self._further if self.calls else self._head).match(self._text)
        if found is None:
            return False
        if self.calls:
            self.calls[-1].arguments.append("}")
        self._text = self._text[found.end() :]
        self.calls.append(ScannedCall(found[1], arguments=["{"]))
        self._properties = properties_of(found[1], self._tools)
        return True

    def _take_argument(self) -> bool:
        if not self.calls or self._close not in self._text:
            return False
        found = self._argument.match(self._text)
        if found is None:
            return False
        self._text = self._text[found.end() :]
        arguments = self.calls[-1].arguments
        arguments.append((", " if len(arguments) > 1 else "") + tagged_pair(found, self._properties))
        return True


NEVER = r"(?!)"
"""Matches nothing: a block of this family holds one call."""


def tag_scanner(head: str, further: str, argument: re.Pattern[str], close: str) -> MakeScanner:
    """Makes scanners of calls whose arguments stand between tags. `close`: what ends an argument."""
    heads = re.compile(head), re.compile(further)
    return lambda tools: TagScanner(heads, argument, close, tools)


# ------------------------------------------------------------ arguments in Python

_PYTHON_HEAD = re.compile(r"\s*+\[?\s*+([A-Za-z_][A-Za-z0-9_.]*)\(")
_PYTHON_FURTHER = re.compile(r"\s*\)\s*,\s*([A-Za-z_][A-Za-z0-9_.]*)\(")
_PYTHON_KEY = re.compile(r"\s*,?\s*([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*")
_PYTHON_TOKEN = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|[(\[{]|[)\]}]|,|[^'"()\[\]{},#]+""", re.DOTALL)


class PythonScanner:
    """Calls written as Python, with named arguments; each argument is a piece."""

    def __init__(self) -> None:
        self.calls: list[ScannedCall] = []
        self._text = ""
        self._broken = False

    def feed(self, text: str) -> None:
        self._text += text
        if any(mark in text for mark in "(,)"):
            while not self._broken and (self._begin() or self._take_argument()):
                pass

    def _begin(self) -> bool:
        found = (_PYTHON_FURTHER if self.calls else _PYTHON_HEAD).match(self._text)
        if found is None:
            return False
        if self.calls:
            self.calls[-1].arguments.append("}")
        self._text = self._text[found.end() :]
        self.calls.append(ScannedCall(found[1], arguments=["{"]))
        return True

    def _take_argument(self) -> bool:
        found = _PYTHON_KEY.match(self._text) if self.calls else None
        end = None if found is None else self._end_of_value(found.end())
        if found is None or end is None:
            return False
        try:
            value = ast.literal_eval(self._text[found.end() : end].strip())
            piece = f"{json.dumps(found[1])}: {python_value(value)}"
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            self._broken = True
            return False
        self._text = self._text[end:]
        arguments = self.calls[-1].arguments
        arguments.append((", " if len(arguments) > 1 else "") + piece)
        return True

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


def python_scanner(_tools: Sequence[Tool]) -> CallScanner:
    return PythonScanner()
