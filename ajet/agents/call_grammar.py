"""How a tool call is written as text: `name({"key": …})`, `name(key="…", other=[1, 2])`, `name("…")`.

A grammar reads it from left to right, so brackets, commas and quotes inside a value belong to the value. Values are
JSON or Python literals: numbers, strings in single, double or triple quotes, `true`/`True`, `null`/`None`, lists and
mappings. What is none of these, as in `calculator(expression=5+3)`, is text up to the closing bracket or the next
argument's name. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 64
"""Deeper nesting is refused: it is noise, and would exhaust the stack."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*+\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?(?![\w.])")
_WORDS: dict[str, Any] = {
    "true": True, "True": True, "false": False, "False": False, "null": None, "None": None,
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX = {"u": 4, "x": 2, "U": 8}


class CallSyntaxError(ValueError):
    """Text that is no call. The message says what was expected, and where."""


def read_call(text: str, parameters: Sequence[str] | None = None, start: int = 0) -> tuple[str, dict[str, Any], int]:
    """The tool's name, its arguments, and where the call ends. `parameters`: the names that arguments without one get,
    in order; None: `arg_0`, `arg_1` …"""
    reader = _GrammarReader(text, start)
    reader.space()
    name = reader.match(_NAME, "the name of a tool")
    reader.space()
    if not reader.at("("):
        raise reader.wrong("`(` after the tool's name")
    arguments = reader.arguments(parameters)
    return name, arguments, reader.position


def read_value(text: str, start: int = 0) -> tuple[Any, int]:
    """A value, and where it ends."""
    reader = _GrammarReader(text, start)
    return reader.value(0), reader.position


class _GrammarReader:
    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.position = start

    def wrong(self, expected: str) -> CallSyntaxError:
        found = self.text[self.position : self.position + 20]
        return CallSyntaxError(f"expected {expected} at character {self.position + 1}, found {found or 'the end'!r}")

    def space(self) -> None:
        found = _SPACE.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def at(self, mark: str) -> bool:
        return self.text.startswith(mark, self.position)

    def take(self, mark: str) -> bool:
        """Skip `mark`, if it is next."""
        self.space()
        if not self.at(mark):
            return False
        self.position += len(mark)
        return True

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise self.wrong(expected)
        self.position = found.end()
        return found[0]

    def arguments(self, parameters: Sequence[str] | None) -> dict[str, Any]:
        """Read the arguments, from `(` to `)`."""
        self.take("(")
        named: dict[str, Any] = {}
        unnamed: list[Any] = []
        while not self.take(")"):
            if named or unnamed:
                if not self.take(","):
                    raise self.wrong("`,` or `)`")
                if self.take(")"):  # a comma after the last argument
                    break
            self.space()
            key = _KEY.match(self.text, self.position)
            if key is None:
                unnamed.append(self._argument())
                continue
            if key[1] in named:
                raise self.wrong(f"each argument once ({key[1]} is given twice)")
            self.position = key.end()
            named[key[1]] = self._argument()
        return self._together(unnamed, named, parameters)

    def _together(self, unnamed: list[Any], named: dict[str, Any], parameters: Sequence[str] | None) -> dict[str, Any]:
        if len(unnamed) == 1 and not named and isinstance(unnamed[0], dict):
            return unnamed[0]
        if parameters is None:
            parameters = [f"arg_{index}" for index in range(len(unnamed))]
        if len(unnamed) > len(parameters):
            raise self.wrong("arguments with their names, as in name(key=value)")
        given = dict(zip(parameters, unnamed, strict=False))
        if twice := given.keys() & named.keys():
            raise self.wrong(f"each argument once ({', '.join(sorted(twice))} is given twice)")
        return {**given, **named}

    def _argument(self) -> Any:
        """A value, or text without quotes."""
        self.space()
        begin = self.position
        wrong: CallSyntaxError | None = None
        try:
            value = self.value(0)
            self.space()
            if self.at(",") or self.at(")"):
                return value
        except CallSyntaxError as error:
            wrong = error
        bare = None if self.text[begin : begin + 1] in ('"', "'", "{", "[") else self._bare(begin)
        if bare is None:
            raise wrong or self.wrong("`,` or `)`")
        return bare

    def _bare(self, begin: int) -> str | None:
        """Text on one line up to the bracket that closes the call, or a comma and the name of an argument."""
        depth = 0
        for position in range(begin, len(self.text)):
            mark = self.text[position]
            if mark == "\n":
                return None
            ends = mark == ")" and not depth
            if mark == "," and not depth:
                space = _SPACE.match(self.text, position + 1)
                ends = space is not None and _KEY.match(self.text, space.end()) is not None
            if ends:
                self.position = position
                return self.text[begin:position].strip() or None
            depth += {"(": 1, ")": -1}.get(mark, 0)
        return None

    def value(self, depth: int) -> Any:
        self.space()
        if depth > MAX_DEPTH:
            raise self.wrong(f"at most {MAX_DEPTH} brackets inside each other")
        if self.at("{"):
            return self._mapping(depth)
        if self.at("[") or self.at("("):
            return self._list(depth)
        for quote in ('"""', "'''", '"', "'"):
            if self.at(quote):
                return self._string(quote)
        number = _NUMBER.match(self.text, self.position)
        if number is not None:
            self.position = number.end()
            return _number(number[0])
        word = _WORD.match(self.text, self.position)
        if word is not None and word[0] in _WORDS:
            self.position = word.end()
            return _WORDS[word[0]]
        raise self.wrong("a value (text in quotes, a number, true, false, null, a list or a mapping)")

    def _mapping(self, depth: int) -> dict[str, Any]:
        self.take("{")
        values: dict[str, Any] = {}
        while not self.take("}"):
            if values and not self.take(","):
                raise self.wrong("`,` or `}`")
            if values and self.take("}"):
                break
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise self.wrong("text in quotes as a key")
            if not self.take(":"):
                raise self.wrong("`:` after the key")
            values[key] = self.value(depth + 1)
        return values

    def _list(self, depth: int) -> list[Any]:
        closing = "]" if self.at("[") else ")"
        self.position += 1
        values: list[Any] = []
        while not self.take(closing):
            if values and not self.take(","):
                raise self.wrong(f"`,` or `{closing}`")
            if values and self.take(closing):
                break
            values.append(self.value(depth + 1))
        return values

    def _string(self, quote: str) -> str:
        begin = self.position
        self.position += len(quote)
        parts: list[str] = []
        while not self.at(quote):
            if self.position >= len(self.text):
                self.position = begin
                raise self.wrong(f"the closing {quote} of this text")
            if self.at("\\"):
                parts.append(self._escape())
            else:
                parts.append(self.text[self.position])
                self.position += 1
        self.position += len(quote)
        # JSON writes a character beyond U+FFFF as two escapes, each half of a surrogate pair
        return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def _escape(self) -> str:
        mark = self.text[self.position + 1 : self.position + 2]
        digits = _HEX.get(mark)
        if digits is not None:
            code = self.text[self.position + 2 : self.position + 2 + digits]
            if re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", code) and int(code, 16) <= 0x10FFFF:
                self.position += 2 + digits
                return chr(int(code, 16))
        self.position += 2
        return _ESCAPES.get(mark, mark if mark in "\\\"'/" else f"\\{mark}")


def _number(text: str) -> int | float:
    plain = text.replace("_", "")
    if re.fullmatch(r"[+-]?\d+", plain):
        if len(plain) > 4000:  # int() refuses more digits
            raise CallSyntaxError("expected a number of at most 4000 digits")
        return int(plain)
    return float(plain)
