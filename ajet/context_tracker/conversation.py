"""`Conversations`: the messages of all calls of an episode, as a tree, so that a request finds what it continues.

A request is walked from its first message. What was seen before in the same form is recognised by one comparison; only
a message that looks different is brought into plain form and looked up by its key: cost follows what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.context_tracker.canonical import (
    MessageKey,
    call_ids,
    message_key,
    plain_message,
    snapshot,
    split_reasoning,
)
from ajet.context_tracker.template_probe import Skeleton, extend_skeleton, letter
from ajet.schema.chat import Message

if TYPE_CHECKING:
    from ajet.context_tracker.record import CallRecord


@dataclass(slots=True, eq=False)
class Turn:
    """A message in its place: the messages before it are its parents."""

    message: Message
    parent: Turn | None
    depth: int
    """How many messages lead here, this one included."""
    skeleton: Skeleton
    raw: Any = None
    """The form in which a client sent it last, to recognise it by; None: not seen yet, or not comparable."""
    reasoning: str = ""
    """The reasoning that the client sent with it last."""
    children: dict[MessageKey, Turn] = field(default_factory=dict)
    last: Turn | None = None
    """The child that was asked for last."""
    replies: list[CallRecord] = field(default_factory=list)
    """Recorded calls whose reply this message is."""
    prompts: list[CallRecord] = field(default_factory=list)
    """Calls whose messages end here."""
    seen: int = 0
    """The serial number of the last request that held this message."""

    def resolved(self) -> Message:
        """The message as it is rendered: a recorded reply keeps the reasoning that clients leave out."""
        if self.reasoning and self.replies and self.reasoning != split_reasoning(self.message)[0]:
            return {**self.message, "reasoning_content": self.reasoning}
        return self.message

    def path(self) -> list[Turn]:
        """The turns from the first message to this one."""
        return self.since(0)

    def since(self, depth: int) -> list[Turn]:
        """The turns behind the first `depth` messages."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None and turn.depth > depth:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


class Walk(NamedTuple):
    """Where a request's messages led."""

    turn: Turn
    known: int
    """How many of the messages earlier requests and replies held."""


class Conversations:
    """The tree of messages of one episode."""

    def __init__(self) -> None:
        self.root = Turn({}, None, 0, ())
        self.serial = 0
        self._latest: dict[str, tuple[list[Any], Turn]] = {}
        """Each agent's latest request as it was sent, and where it led: the next one mostly begins with it."""

    def walk(self, agent: str, messages: Sequence[Any]) -> Walk:
        """Follow a request's messages, adding those that are new; raises InvalidRequestError."""
        self.serial += 1
        serial = self.serial
        sent, turn = self._latest.get(agent, ([], self.root))
        if len(sent) > len(messages) or sent != messages[: len(sent)]:
            sent, turn = [], self.root
        start = known = len(sent)
        new = []
        for index in range(start, len(messages)):
            raw = messages[index]
            child = turn.last
            if child is None or child.raw is None or child.raw != raw:
                child = self._child(turn, messages, index)
                turn.last = child
            if child.seen or child.replies:
                known = index + 1
            child.seen = serial
            turn = child
            new.append(child.raw)
        sent += new
        self._latest[agent] = (sent, turn)
        return Walk(turn, known)

    def add_reply(self, prompt: Turn, reply: Message, record: CallRecord) -> Turn:
        """Put a recorded reply in its place."""
        message = plain_message(reply, "reply")
        key = message_key(message, {})
        turn = prompt.children.get(key)
        if turn is None:
            turn = self._add(prompt, key, message)
        elif not turn.replies:
            turn.message = message
        turn.replies.append(record)
        prompt.last = turn
        return turn

    def _child(self, parent: Turn, messages: Sequence[Any], index: int) -> Turn:
        raw = messages[index]
        message = plain_message(raw, f"messages[{index}]")
        order = _call_order(messages, index) if message["role"] == "tool" else {}
        key = message_key(message, order)
        turn = parent.children.get(key)
        if turn is None:
            if message["role"] == "tool":
                message["tool_call_id"] = _recorded_id(parent, key[2], message["tool_call_id"])
            turn = self._add(parent, key, message)
        turn.raw = snapshot(raw)
        if message["role"] == "assistant":
            turn.reasoning = split_reasoning(message)[0]
        return turn

    @staticmethod
    def _add(parent: Turn, key: MessageKey, message: Message) -> Turn:
        turn = Turn(message, parent, parent.depth + 1, extend_skeleton(parent.skeleton, letter(message)))
        parent.children[key] = turn
        return turn


def _call_order(messages: Sequence[Any], index: int) -> dict[str, int]:
    """The tool-call ids of the last assistant message before this one, numbered."""
    for before in range(index - 1, -1, -1):
        if messages[before].get("role") == "assistant":
            return call_ids(plain_message(messages[before], f"messages[{before}]"))
    return {}


def _recorded_id(parent: Turn, order: Any, own: str) -> str:
    """The id under which the recorded reply made the call that a tool message answers: clients may number anew."""
    turn: Turn | None = parent
    while turn is not None and turn.depth:
        if turn.message["role"] == "assistant":
            calls = turn.message.get("tool_calls", ())
            return str(calls[order]["id"]) if isinstance(order, int) and order < len(calls) else own
        turn = turn.parent
    return own
