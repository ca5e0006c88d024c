"""Adapters: what is made of the spans of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ajet.observe.tracing import (
    Triplet,
    to_messages,
    to_triplets,
)
from ajet.schema.errors import UserError
from ajet.schema.span import Span

T = TypeVar("T")
FIRST_OCCURRENCE = "first_occurrence"
"""How rewards find their calls: in the order of time, each goes to the latest call before it that has none."""


class TraceAdapter(Generic[T]):
    """Override `adapt`. An adapter can be called like a function."""

    def adapt(self, spans: Sequence[Span]) -> T:
        raise UserError(f"{type(self).__name__} does not override `adapt`")

    def __call__(self, spans: Sequence[Span]) -> T:
        return self.adapt(spans)


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Prompt, response and reward of each model call, of the agents whose name matches `agent_match`."""

    def __init__(self, *, agent_match: str | None = None, reward_match: str = FIRST_OCCURRENCE) -> None:
        if str(reward_match).lower().rpartition(".")[2] != FIRST_OCCURRENCE:
            raise UserError(f"reward_match={reward_match!r}: rewards are matched by {FIRST_OCCURRENCE!r} alone")
        self._agent = agent_match

    def adapt(self, spans: Sequence[Span]) -> list[Triplet]:
        return to_triplets(spans, agent=self._agent)


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """A conversation (`messages`, `tools`) per model call, to fine-tune on."""

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        return to_messages(spans)


LlmProxyTraceToTriplet = TracerTraceToTriplet
"""Model calls come from the gateway or from spans: both are read alike."""
