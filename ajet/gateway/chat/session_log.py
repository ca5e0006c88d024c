"""What a session keeps beside its calls: spans (`SpanLog`), and responses that later requests may refer to
(`StoredResponses`)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from ajet.observe.tracing import bounded
from ajet.schema.chat import Message
from ajet.schema.span import Span

log = logging.getLogger("ajet.observe.tracing")

MAX_SPANS = 2_000
"""The limit of one episode. An agent's tools and messages make far fewer."""
MAX_BYTES = 4 * 1024 * 1024


class SpanLog:
    """The spans of one episode. Lives on the service loop."""

    def __init__(self, episode_id: str) -> None:
        self.spans: list[Span] = []
        self.left_out = 0
        self._episode_id = episode_id
        self._bytes = 0
        self._known: set[tuple[str, str]] = set()

    @property
    def room(self) -> int:
        """How many more spans can be kept, at most."""
        return MAX_SPANS - len(self.spans) if self._bytes < MAX_BYTES else 0

    def add(self, span: Span) -> None:
        """Keep a span, as this episode's, under its next number, unless there is no room for it, or it is known.

        A sender repeats what was not acknowledged."""
        if (span.trace_id, span.span_id) in self._known:
            return
        span = replace(
            bounded(span),
            rollout_id=self._episode_id.partition(".")[0],
            attempt_id=self._episode_id,
            sequence_id=len(self.spans) + 1,
        )
        size = len(msgspec.json.encode(span))
        if not self.room or self._bytes + size > MAX_BYTES:
            self.leave_out(1)
            return
        self._known.add((span.trace_id, span.span_id))
        self._bytes += size
        self.spans.append(span)

    def leave_out(self, count: int) -> None:
        """Count spans that were refused."""
        if count and not self.left_out:
            log.warning(
                "episode %s has more spans than are kept (%d, and %d MB): the rest is left out and counted",
                *(self._episode_id, MAX_SPANS, MAX_BYTES // 1024**2),
            )
        self.left_out += count


MAX_RESPONSES = 1000
"""More than an episode has calls, unless it runs wild."""
MAX_RESPONSE_BYTES = 32 * 1024 * 1024
"""The limit of one episode."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and everything before it."""

    agent: str
    messages: list[Message]
    """The conversation up to and including the reply, without `instructions`."""
    items: list[dict[str, Any]]
    """The output items of the response."""
    size: int
    """Bytes of what it adds to the response it continues."""


class StoredResponses:
    """The responses of one episode, by id."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, tuple[str, dict[str, Any]]] = {}
        """By id: the agent, and the item."""
        self._bytes = 0

    def put(
        self, response_id: str, agent: str, before: list[Message], new: list[Message], items: list[dict[str, Any]]
    ) -> None:
        """Store a response: `before` is the conversation it continued, `new` what it added, its reply included."""
        stored = StoredResponse(agent, [*before, *new], items, len(_encode(new)))
        self._responses[response_id] = stored
        self._items.update((item["id"], (agent, item)) for item in items)
        self._bytes += stored.size
        while len(self._responses) > MAX_RESPONSES or (self._bytes > MAX_RESPONSE_BYTES and len(self._responses) > 1):
            _, oldest = self._responses.popitem(last=False)
            self._bytes -= oldest.size
            for item in oldest.items:
                del self._items[item["id"]]

    def get(self, response_id: str, agent: str | None = None) -> StoredResponse | None:
        """A response, if it is this agent's (None: anybody's)."""
        stored = self._responses.get(response_id)
        return stored if stored is not None and agent in (None, stored.agent) else None

    def item(self, item_id: str, agent: str | None = None) -> dict[str, Any] | None:
        """An output item, if it is this agent's (None: anybody's)."""
        owner, item = self._items.get(item_id, ("", None))
        return item if agent in (None, owner) else None

    def clear(self) -> None:
        self._responses.clear()
        self._items.clear()
        self._bytes = 0
