"""`Conversations`: the messages of all calls of an episode, as a tree, so that a request finds what it continues; and
`CallRecord`, a call while its episode runs.

A request is walked from its first message. A message that was seen before in the same form is recognised by one
comparison; only one that looks different is brought into plain form and looked up by its key. So the cost follows what
is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ajet.context_tracker.messages import (
    MessageKey,
    Skeleton,
    call_ids,
    message_key,
    plain_message,
    snapshot,
    split_reasoning,
)
from ajet.schema.chat import ChatReply, ChatRequest, JsonMessages, Message, Tool
from ajet.schema.episode import ROOT, Call, CallTree, IntArray, Run
from ajet.schema.errors import ModelCallError


@dataclass(slots=True, eq=False)
class Node:
    """A run that may still be split. A split node keeps its end, so a reference to a node is a reference to its end."""

    ids: IntArray
    parent: Node | None
    start: int
    call: int = ROOT
    contexts: dict[int, Node] = field(default_factory=dict)
    """Context runs that follow this one, by first token."""
    sampled: list[Node] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Growth:
    """Grows the runs of one episode."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), None, 0)

    def add_context(self, parent: Node, ids: Sequence[int]) -> tuple[Node, int]:
        """Insert context after a run. Return the run where it ends, and how many of its tokens were already there."""
        rest = np.asarray(ids, np.int32)
        node, shared = parent, 0
        while len(rest):
            child = node.contexts.get(int(rest[0]))
            if child is None:
                child = Node(rest, node, node.end)
                node.contexts[int(rest[0])] = child
                return child, shared
            length = min(len(child.ids), len(rest))
            differ = np.flatnonzero(child.ids[:length] != rest[:length])
            common = int(differ[0]) if len(differ) else length
            shared += common
            node = child if common == len(child.ids) else _split(child, common)
            rest = rest[common:]
        return node, shared

    def add_sampled(self, parent: Node, ids: Sequence[int], call: int) -> Node:
        """Insert the reply of a call."""
        node = Node(np.asarray(ids, np.int32), parent, parent.end, call)
        parent.sampled.append(node)
        return node

    @staticmethod
    def path_ids(node: Node) -> list[int]:
        """All ids from the root to the end of a run."""
        parts = []
        current: Node | None = node
        while current is not None:
            parts.append(current.ids)
            current = current.parent
        ids: list[int] = np.concatenate(parts[::-1]).tolist()
        return ids

    def export(self, calls: Sequence[tuple[Call, Node, Node | None]], toolsets: list[list[Tool]]) -> CallTree:
        """The tree as plain data, with runs in depth-first order. `calls`: with the runs of prompt and reply."""
        runs: list[Run] = []
        index: dict[int, int] = {}
        stack = [child for child in self._children(self.root)[::-1]]
        while stack:
            node = stack.pop()
            parent = ROOT if node.parent is None or node.parent is self.root else index[id(node.parent)]
            index[id(node)] = len(runs)
            runs.append(Run(node.ids, parent, node.start, node.call))
            stack += self._children(node)[::-1]
        for call, prompt, reply in calls:
            call.prompt_run = index.get(id(prompt), ROOT)
            call.prompt_tokens = prompt.end
            call.run = ROOT if reply is None else index[id(reply)]
        return CallTree(runs, [call for call, _, _ in calls], toolsets)

    @staticmethod
    def _children(node: Node) -> list[Node]:
        contexts = [node.contexts[token] for token in sorted(node.contexts)]
        return contexts + sorted(node.sampled, key=lambda child: child.call)


def _split(node: Node, at: int) -> Node:
    """Cut a context run in two; the node keeps the second part."""
    assert node.parent is not None and 0 < at < len(node.ids)
    upper = Node(node.ids[:at], node.parent, node.start)
    node.parent.contexts[int(upper.ids[0])] = upper
    upper.contexts[int(node.ids[at])] = node
    node.ids, node.start, node.parent = node.ids[at:], node.start + at, upper
    return upper


@dataclass(slots=True, eq=False)
class Turn:
    """A message in its place in the tree; its ancestors are the messages before it."""

    message: Message
    parent: Turn | None
    depth: int
    """How many messages lead here, including this one."""
    raw: Any = None
    """The form in which a client last sent it, to recognise it by. None: not seen yet, or not comparable."""
    reasoning: str = ""
    """The reasoning that the client last sent with it."""
    children: dict[MessageKey, Turn] = field(default_factory=dict)
    last: Turn | None = None
    """The child that was last walked to."""
    replies: list[CallRecord] = field(default_factory=list)
    """Recorded calls whose reply this message is."""
    first: CallRecord | None = None
    """The first of them in the order of their keys: the message is what it said."""
    prompts: list[CallRecord] = field(default_factory=list)
    """Calls whose messages end here."""
    seen: int = 0
    """The serial number of the last request that held this message."""

    def resolved(self) -> Message:
        """The message as it is rendered: a recorded reply keeps its reasoning even if clients leave it out."""
        if self.reasoning and self.replies and self.reasoning != split_reasoning(self.message)[0]:
            return {**self.message, "reasoning_content": self.reasoning}
        return self.message

    def follows(self, other: Turn) -> bool:
        """Whether the other message is one of those before this one."""
        turn = self.parent
        while turn is not None and turn.depth > other.depth:
            turn = turn.parent
        return turn is other

    def path(self) -> list[Turn]:
        """The turns from the first message to this one."""
        return self.since(0)

    def since(self, depth: int) -> list[Turn]:
        """The turns after the first `depth` messages."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None and turn.depth > depth:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


class Audit(NamedTuple):
    """What a conversation that grew by appending is compared with when it is rendered whole from time to time."""

    opening: str
    """The text of its first prompt."""
    messages: int
    """How many messages it had when it was last rendered whole."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call while its episode runs, and its place in the trees of messages and of tokens."""

    index: int
    call: Call
    turn: Turn
    """The last message of its request."""
    prompt: Node
    kwargs_key: str
    shape: Skeleton
    """The shape of the history to which it was sampled."""
    audit: Audit
    prompt_ids: list[int]
    """Kept for the next call; empty once another call has extended this one, or it has failed."""
    begun: int
    """When it began, on the tracker's clock of begins and ends."""
    is_step: bool
    """Whether it counts as a step: the further choices of a request don't."""
    restated: int
    """What `Conversations.restated` was when it began."""
    ended: int = 0
    """When it ended, on the same clock; 0 while in flight."""
    requests_before: int = 0
    """The serial number of the last request before the reply came."""
    reply: Node | None = None
    reply_turn: Turn | None = None
    said: Message = field(default_factory=dict)
    """Its reply in plain form: the same turn may hold replies that differ in their reasoning."""
    call_marks: str = ""
    """What the ids of its tool calls are: see `Conversations.mark_calls`."""
    empty_thought: bool = False
    """Whether the reply has a thought without content."""
    reasoning: str = ""

    @property
    def reply_key(self) -> tuple[bytes, bytes, str]:
        """Orders replies with equal messages by what was sampled, not by which came first."""
        assert self.reply is not None
        return self.reply.ids.tobytes(), self.call.logprobs.tobytes(), self.call.agent


class Walk(NamedTuple):
    """Where a request's messages led."""

    turn: Turn
    known: int
    """How many of the messages were in earlier requests or replies."""
    fresh: Turn | None = None
    """The first turn that this request added."""


KEPT_REQUESTS = 4
"""An agent's conversations that may take turns without being compared message by message."""


class Latest(NamedTuple):
    """A conversation's latest request, and where it led: the next one usually begins with it."""

    turn: Turn
    sent: list[Any]
    """Its messages as they were sent; empty if they came as JSON."""
    source: bytes = b""
    """The JSON, in which the last message stands before `end`."""
    end: int = 0

    def begins(self, messages: Sequence[Any]) -> bool:
        """Whether a request begins with this one."""
        if isinstance(messages, JsonMessages):
            return self.source != b"" and messages.repeats(self.source, self.end, self.turn.depth)
        return 0 < len(self.sent) <= len(messages) and self.sent == messages[: len(self.sent)]


class Conversations:
    """The tree of messages of one episode."""

    def __init__(self) -> None:
        self.root = Turn({}, None, 0)
        self.serial = 0
        self.restated = 0
        """How often a message that was known has been sent with other reasoning, so that it is rendered differently."""
        self.call_names: dict[str, str] = {}
        """The id of each tool call so far, and which tool it called; an empty string if there were several."""
        self._latest: dict[str, list[Latest]] = {}  # of each agent, latest first

    def walk(self, agent: str, messages: Sequence[Any]) -> Walk:
        """Follow a request's messages, adding new ones. Raises InvalidRequestError."""
        self.serial += 1
        serial = self.serial
        before = self.repeated(agent, messages)
        turn, sent = (before.turn, before.sent) if before is not None else (self.root, [])
        start = known = turn.depth
        new = []
        fresh: Turn | None = None
        for index in range(start, len(messages)):
            raw = messages[index]
            child = turn.last
            if child is None or child.raw is None or child.raw != raw:
                try:
                    child = self._child(turn, messages, index)
                except ModelCallError:
                    self.forget(agent, fresh)
                    raise
                turn.last = child
                if fresh is None and not child.seen and not child.replies:
                    fresh = child
            if child.seen or child.replies:
                known = index + 1
            child.seen = serial
            turn = child
            new.append(child.raw)
        if isinstance(messages, JsonMessages):
            latest = Latest(turn, [], messages.source, messages.end)
        else:
            sent += new
            latest = Latest(turn, sent)
        others = [one for one in self._latest.get(agent, ()) if one is not before]
        self._latest[agent] = [latest, *others[: KEPT_REQUESTS - 1]]
        return Walk(turn, known, fresh)

    def repeated(self, agent: str, messages: Sequence[Any]) -> Latest | None:
        """The latest of the agent's requests that this one begins with."""
        return next((before for before in self._latest.get(agent, ()) if before.begins(messages)), None)

    def forget(self, agent: str, fresh: Turn | None) -> None:
        """A request is refused: drop the turns that it added, from `fresh` on."""
        self._latest.pop(agent, None)
        if fresh is not None and fresh.parent is not None:
            parent = fresh.parent
            parent.children = {key: child for key, child in parent.children.items() if child is not fresh}
            if parent.last is fresh:
                parent.last = None

    def add_reply(self, prompt: Turn, reply: Message, record: CallRecord) -> Turn:
        """Put a recorded reply in its place."""
        record.said = plain_message(reply, "reply")
        record.call_marks = self.mark_calls(record.said)
        key = message_key(record.said, {})
        turn = prompt.children.get(key) or self._add(prompt, key, record.said)
        turn.replies.append(record)
        if turn.first is None or record.reply_key < turn.first.reply_key:
            turn.first, turn.message = record, record.said
        prompt.last = turn
        return turn

    def mark_calls(self, message: Message) -> str:
        """Remember a message's tool calls, and return a mark for each, since templates may look a name up by its id.

        No id: `-`; a new one: `.`; one that an earlier call has, of the same tool: `=`, of another: `x`.
        """
        marks = ""
        for call in message.get("tool_calls", ()):
            identity, name = call["id"], call["function"]["name"]
            before = self.call_names.get(identity)
            marks += "-" if not identity else "." if before is None else "=" if before == name else "x"
            if identity:
                self.call_names[identity] = name if before in (None, name) else ""
        return marks

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
            self.mark_calls(message)
        turn.raw = snapshot(raw)
        if message["role"] == "assistant":
            self._restate(turn, message)
        return turn

    def _restate(self, turn: Turn, message: Message) -> None:
        """Render an assistant's message as it is sent now; of a recorded reply, only other reasoning counts."""
        before = turn.resolved()
        turn.reasoning = split_reasoning(message)[0]
        if not turn.replies:
            calls = {"tool_calls": turn.message["tool_calls"]} if "tool_calls" in message else {}
            turn.message = {**message, **calls}  # the results that follow go by the ids that came first
        if turn.resolved() != before:
            self.restated += 1
            self._latest.clear()

    @staticmethod
    def _add(parent: Turn, key: MessageKey, message: Message) -> Turn:
        turn = Turn(message, parent, parent.depth + 1)
        parent.children[key] = turn
        return turn


def _call_order(messages: Sequence[Any], index: int) -> dict[str, int]:
    """The tool-call ids of the last assistant message before this one, mapped to their positions."""
    for before in range(index - 1, -1, -1):
        if messages[before].get("role") == "assistant":
            return call_ids(plain_message(messages[before], f"messages[{before}]"))
    return {}


def _recorded_id(parent: Turn, order: Any, own: str) -> str:
    """The id that the recorded reply gave to the call that a tool message answers: clients may use ids of their own."""
    turn: Turn | None = parent
    while turn is not None and turn.depth:
        if turn.message["role"] == "assistant":
            calls = turn.message.get("tool_calls", ())
            return str(calls[order]["id"]) if isinstance(order, int) and order < len(calls) else own
        turn = turn.parent
    return own


_SAID = ("role", "content", "tool_calls", "tool_call_id", "name")
"""What two messages are compared by: clients drop or add other fields."""


class MessageCalls:
    """Calls in the order in which they were answered. Each extends the latest whose messages and reply it repeats."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._known: list[list[Any]] = []
        """The messages and the reply of each call."""

    def add(
        self, name: str, request: ChatRequest, reply: ChatReply, toolset: int, started_s: float, seconds: float
    ) -> None:
        said = [_said(message) for message in request.messages]
        extends = self._extended(request.agent, said)
        known = 0 if extends == ROOT else len(self._known[extends])
        prompt_tokens, reply_tokens = reply.counted
        self.calls.append(
            Call(
                name=name,
                agent=request.agent,
                target=request.target,
                turn=0 if extends == ROOT else self.calls[extends].turn + 1,
                prompt_run=ROOT,
                prompt_tokens=prompt_tokens,
                reply_tokens=reply_tokens,
                finish_reason=reply.completion.finish_reason,
                sampling=request.sampling,
                trainable=False,
                extends=extends,
                new_messages=[dict(message) for message in request.messages[known:]],
                reply=dict(reply.message),
                tools=toolset,
                started_s=started_s,
                seconds=seconds,
            )
        )
        self._known.append([*said, _said(reply.message)])

    def _extended(self, agent: str, said: list[Any]) -> int:
        for index in range(len(self.calls) - 1, -1, -1):
            known = self._known[index]
            if self.calls[index].agent == agent and len(known) < len(said) and said[: len(known)] == known:
                return index
        return ROOT


def _said(message: Message) -> dict[str, Any]:
    return {key: message[key] for key in _SAID if message.get(key) not in (None, "", [])}
