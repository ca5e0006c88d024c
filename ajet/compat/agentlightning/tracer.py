"""Tracers: what records the spans of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ajet.observe.tracing import (
    record_spans,
)
from ajet.schema.span import Span


class Tracer:
    """Records what is emitted within `trace_context`. It has no options: there is nothing to instrument."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def trace_context(
        self,
        name: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sink: Callable[[Span], None] | None = None,
    ) -> Iterator[list[Span]]:
        """What is emitted within belongs to this attempt; both ids or neither. Yields the spans so far; `sink` gets
        each as it ends."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context takes rollout_id and attempt_id together")
        with record_spans(sink, attempt_id=attempt_id or "local", rollout_id=rollout_id or "") as spans:
            self._spans = spans
            yield spans

    def get_last_trace(self) -> list[Span]:
        """The spans of the latest context."""
        return list(self._spans)


OtelTracer = Tracer
AgentOpsTracer = Tracer
DummyTracer = Tracer
