"""`Shape`: what in a conversation can matter to a template besides texts and lengths, with one letter per message."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple

from ajet.schema.chat import Message

Skeleton = tuple[str, ...]
"""The shape of a history: its head (`s`, `d` or `-`) and its last two turns, with one letter per message."""

MAX_PERIOD = 6
TURN_LETTERS = 12
"""How much of a turn's shape matters, as long as no kind of reply is lost. Twice stands for a hundred times."""
STEP = re.compile(r".t*")
"""A reply and the results of its calls, in letters."""
SHORT = 5
"""Marks of calls and results so few that they are kept as they are. In longer ones, twice stands for many times."""
RUN = re.compile(r"(..?)\1{2,}")

LETTERS = {"system": "s", "developer": "d", "user": "u", "tool": "t"}
REPLIES = {  # (reasoning, has content, tool calls) → letter; upper case: with content
    ("", False, 0): "e",
    ("", True, 0): "a",
    ("field", False, 0): "q",
    ("field", True, 0): "r",
    ("inline", True, 0): "i",
    ("", False, 1): "c",
    ("", True, 1): "C",
    ("", False, 2): "m",
    ("", True, 2): "M",
    ("field", False, 1): "k",
    ("field", True, 1): "K",
    ("field", False, 2): "n",
    ("field", True, 2): "N",
    ("inline", True, 1): "J",
    ("inline", True, 2): "P",
}
HOLDS = {name: shape for shape, name in REPLIES.items()}
WITHOUT_REASONING = {name: REPLIES[("", content, calls)] for name, (_, content, calls) in HOLDS.items()}


def letter(message: Message) -> str:
    """What in a plain message can matter to a template's structure."""
    role = message["role"]
    if role != "assistant":
        return LETTERS[role]
    content = message["content"]
    reasoning = "field" if "reasoning_content" in message else "inline" if "</think>" in content else ""
    return REPLIES[(reasoning, bool(content), min(2, len(message.get("tool_calls", ()))))]


@lru_cache(maxsize=65536)
def extend_skeleton(skeleton: Skeleton, new: str) -> Skeleton:
    """The shape of a history after one more message."""
    if not skeleton:
        return (new,) if new in "sd" else ("-", new)
    head, *turns = skeleton
    if new == "u" or not turns:
        return (head, *turns[-1:], new)
    return (head, *turns[:-1], _shorten(turns[-1] + new))


def shape_after(skeleton: Skeleton, messages: Sequence[Message]) -> Skeleton:
    """The shape of a history after more messages."""
    for message in messages:
        skeleton = extend_skeleton(skeleton, letter(message))
    return skeleton


def _shorten(turn: str) -> str:
    for period in range(1, MAX_PERIOD + 1):
        if len(turn) >= 3 * period and turn[-3 * period :] == turn[-period:] * 3:
            return turn[:-period]
    if len(turn) > TURN_LETTERS:  # no kind of reply is lost: one with reasoning may be what a template rewrites later
        steps = STEP.findall(turn)
        for index, step in enumerate(steps[:-1]):
            if step in steps[index + 1 :]:
                return "".join(steps[:index] + steps[index + 1 :])
    return turn


class Shape(NamedTuple):
    """What in a request that follows a reply can matter to a template: everything but texts and lengths."""

    skeleton: Skeleton
    """Of the history that the reply was asked for with."""
    reply: str
    new: str
    has_tools: bool
    kwargs: str
    links: str
    """How messages refer to tool calls. Rules don't depend on it: they are given the real ids."""

    @classmethod
    def of(
        cls,
        skeleton: Skeleton,
        reply: Message,
        marks: str,
        new: Sequence[Message],
        has_tools: bool,
        kwargs: str,
        call_ids: Container[str],
    ) -> Shape:
        """`marks`: of the reply's calls. `call_ids`: of all calls so far."""
        links = f"{marks}|{_links(reply, new, call_ids)}"
        return cls(
            skeleton,
            letter(reply),
            _new_letters(new),
            has_tools,
            kwargs,
            RUN.sub(r"\1\1", links) if len(links) > 5 else links,
        )


def _links(reply: Message, new: Sequence[Message], call_ids: Container[str]) -> str:
    """A mark for each new message: does it answer the next call, another one, an earlier one, or none?"""
    marks = ""
    ids = [call["id"] for call in reply.get("tool_calls", ())]
    answered = 0
    for message in new:
        mark = ","
        if message["role"] == "assistant":
            ids, answered = [call["id"] for call in message.get("tool_calls", ())], 0
        elif message["role"] == "tool":
            mark = _answers(message["tool_call_id"], ids[answered : answered + 1], ids, call_ids)
            answered += 1
        marks += mark + ("n" if "name" in message else "") + ("" if message["content"] else "0")
    return marks + ("" if answered == len(ids) else "p")


def _answers(identity: str, next_id: Sequence[str], ids: Sequence[str], call_ids: Container[str]) -> str:
    if not identity:
        return "-"
    return "." if identity in next_id else "<" if identity in ids else "e" if identity in call_ids else "?"


def _new_letters(new: Sequence[Message]) -> str:
    letters = "".join(map(letter, new))
    while "ttt" in letters:
        letters = letters.replace("ttt", "tt")
    return letters
