"""Tracers: what records the spans that an agent emits. Model calls are recorded by the gateway, for every client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ajet.observe.tracing import record_spans
from ajet.observe.tracing.adapters import Triplet, to_messages, to_triplets
from ajet.schema.errors import UserError
from ajet.schema.span import Span


class Tracer:
    """Records what is emitted within `trace_context`."""

    def __init__(self, **_: Any) -> None:
        """Options of the library's tracers choose what they instrument; there is nothing to instrument here."""
        self._spans: list[Span] = []

    @contextmanager
    def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> Iterator[list[Span]]:
        """What is emitted within belongs to this attempt; both ids or neither. Yields the spans so far."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context takes rollout_id and attempt_id together")
        with record_spans(attempt_id=attempt_id or "local", rollout_id=rollout_id or "") as spans:
            self._spans = spans
            yield spans

    def get_last_trace(self) -> list[Span]:
        """The spans of the latest context."""
        return list(self._spans)


OtelTracer = Tracer


AgentOpsTracer = Tracer


DummyTracer = Tracer


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

    def __init__(self, *, agent_match: str | None = None, reward_match: str = FIRST_OCCURRENCE, **_: Any) -> None:
        """The library's other options say which spans tell of model calls; all that do are read."""
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
