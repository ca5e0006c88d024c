"""What can be told of a JSON body before it is read: whether it is JSON, how deep, of how many parts; and how many
messages, tool calls and token ids it has.

Run as a program, this is the process that `BodyChecks` asks: it needs no package of ours. A question is a line with
the length of the body and the request's path, and then the body; the answer a line of JSON. It ends when its input
does.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any, BinaryIO

import msgspec

MAX_DEPTH = 64
"""Nesting of a request. No chat is deeper, and templates and encoders recurse."""
MAX_NODES = 16_384
"""Objects and arrays of a request: messages, their parts and tool calls, and what tools' schemas consist of."""
MEMORY_BYTES = 1 << 30
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))


class Refused(ValueError):
    """No body that can be read; says why."""


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises Refused."""
    deep = body.count(b"{") + body.count(b"[") > MAX_DEPTH and _too_deep(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    except RecursionError:
        deep = True
    if deep:
        raise Refused(f"the body is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(value, dict):
        raise Refused(f"the body must be a JSON object, not {kind(value)}")
    return value


def _too_deep(body: bytes) -> bool:
    """Whether JSON is nested too deeply, told from its brackets alone: that takes less time than to decode it. Raises
    Refused if it has too many."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = unescaped.translate(None, _NO_BRACKETS).replace(b'""', b"")  # what is left of strings without any
    brackets = b"".join(brackets.split(b'"')[::2])  # those outside of strings
    if brackets.count(b"{") + brackets.count(b"[") > MAX_NODES:
        raise Refused(f"the body holds more than {MAX_NODES} objects and arrays")
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")  # at least the innermost level
    return bool(brackets)


def kind(value: Any) -> str:
    """A value's type in JSON's terms."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


# ---------------------------------------------------------------- counts


class Shape(msgspec.Struct):
    """How many of these its prompt has at least; what is malformed counts nothing."""

    messages: int = 0
    calls: int = 0
    tokens: int = 0
    """Of the longest prompt given as token ids."""


def shape_of(path: str, body: dict[str, Any]) -> Shape:
    """The shape of a request to one of the paths whose bodies become prompts."""
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        prompt = body.get("prompt")
        return Shape(tokens=_tokens(prompt))
    if path.endswith("/responses"):
        return _of_items(_objects(body.get("input")))
    return _of_messages(_objects(body.get("messages")))


def _tokens(prompt: Any) -> int:
    if not isinstance(prompt, list) or not prompt:
        return 0
    return max(map(len, prompt)) if all(isinstance(one, list) for one in prompt) else _numbers(prompt)


def _numbers(prompt: list[Any]) -> int:
    return len(prompt) if all(isinstance(one, int) for one in prompt) else 0


def _of_messages(messages: list[dict[str, Any]]) -> Shape:
    """OpenAI's and Anthropic's. In the latter, each result of a tool becomes a message, and calls are blocks."""
    shape = Shape()
    for message in messages:
        types = [block.get("type") for block in _objects(message.get("content"))]
        shape.messages += max(1, types.count("tool_result"))
        shape.calls += len(_objects(message.get("tool_calls"))) + types.count("tool_use")
    return shape


def _of_items(items: list[dict[str, Any]]) -> Shape:
    """Neighbouring items of a reply become one message; the others a message each."""
    shape = Shape()
    for item in items:
        item_type = item.get("type") or "message"
        if item_type in ("function_call", "custom_tool_call"):
            shape.calls += 1
        elif item_type != "reasoning" and item.get("role") != "assistant":
            shape.messages += 1
    return shape


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


# ---------------------------------------------------------------- the program


class Answer(msgspec.Struct):
    """Either."""

    refused: str = ""
    shape: Shape | None = None


def question(path: str, body: bytes) -> bytes:
    """What the program is asked."""
    return b"%d %b\n%b" % (len(body), path.encode(), body)


def _answer(path: str, body: bytes) -> Answer:
    try:
        return Answer(shape=shape_of(path, read_json(body)))
    except Refused as error:
        return Answer(refused=str(error))
    except MemoryError:
        return Answer(refused="the body takes too much memory to read")


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while head := questions.readline():
        length, _, path = head.decode().rstrip("\n").partition(" ")
        body = questions.read(int(length))
        if len(body) < int(length):
            return  # whoever asked is gone
        answers.write(msgspec.json.encode(_answer(path, body)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(0)  # what is still buffered would be tried, and complained about, once more
