"""`StoredResponses`: the conversations that clients continue by an id instead of sending them again.

Bounded: the oldest are forgotten first. What a response holds is shared with the one it continues, so a chain of
responses costs what its last one says.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from ajet.schema.chat import Message

MAX_RESPONSES = 1000
"""More than an episode has calls, unless it runs wild."""
MAX_BYTES = 32 * 1024 * 1024
"""Of one episode: twice the largest request."""

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

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
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
        while len(self._responses) > self._most or (self._bytes > self._most_bytes and len(self._responses) > 1):
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
