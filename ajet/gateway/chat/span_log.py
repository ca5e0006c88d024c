"""`SpanLog`: the spans of one episode, bounded in number and size. What has no room is counted."""

from __future__ import annotations

import logging

import msgspec
from msgspec.structs import replace

from ajet.observe.tracing.attributes import bounded
from ajet.schema.span import Span

log = logging.getLogger("ajet.observe.tracing")

MAX_SPANS = 2_000
"""Of one episode: far more than an agent's tools and messages, and little beside its tokens."""
MAX_BYTES = 4 * 1024 * 1024


class SpanLog:
    """Lives on the service loop."""

    def __init__(self, episode_id: str) -> None:
        self.spans: list[Span] = []
        self.left_out = 0
        self._episode_id = episode_id
        self._bytes = 0
        self._known: set[tuple[str, str]] = set()

    @property
    def room(self) -> int:
        """How many more spans it takes at most."""
        return MAX_SPANS - len(self.spans) if self._bytes < MAX_BYTES else 0

    def add(self, span: Span) -> bool:
        """Keep a span, as this episode's, under its next number. False: there is no room for it, or it is known.

        A sender repeats what was not acknowledged."""
        if (span.trace_id, span.span_id) in self._known:
            return False
        span = replace(
            bounded(span),
            rollout_id=self._episode_id.partition(".")[0],
            attempt_id=self._episode_id,
            sequence_id=len(self.spans) + 1,
        )
        size = len(msgspec.json.encode(span))
        if not self.room or self._bytes + size > MAX_BYTES:
            self.leave_out(1)
            return False
        self._known.add((span.trace_id, span.span_id))
        self._bytes += size
        self.spans.append(span)
        return True

    def leave_out(self, count: int) -> None:
        """Spans that were refused."""
        if count and not self.left_out:
            log.warning(
                "episode %s has more spans than are kept (%d, and %d MB): the rest is left out and counted",
                *(self._episode_id, MAX_SPANS, MAX_BYTES // 1024**2),
            )
        self.left_out += count
