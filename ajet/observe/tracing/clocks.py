"""`by_our_clock`: spans that arrive from another machine, with their times set right as far as that can be known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ajet.schema.span import Span

SENT_AT = "ajet.sent_at"
"""Of a span's resource: when it was sent, by its sender's clock. Our own senders say so."""
OFFSET = "ajet.clock_offset"
"""Of a span's resource: the seconds that were added to its times."""
NOTICED_S = 1.0
"""Smaller differences are the network's doing."""


def by_our_clock(spans: Sequence[Span], now: float) -> list[Span]:
    """Spans that have just arrived. A sender that doesn't say when it sent them can only be seen to be ahead."""
    offsets: dict[str, float] = {}
    for span in spans:
        clock = clock_of(span)
        said = span.resource.get(SENT_AT)
        if isinstance(said, int | float) and not isinstance(said, bool) and math.isfinite(said):
            offsets[clock] = now - said
        elif span.end_time is not None and now < span.end_time:
            offsets[clock] = min(offsets.get(clock, 0.0), now - span.end_time)
    return [_shifted(span, offsets.get(clock_of(span), 0.0)) for span in spans]


def clock_of(span: Span) -> str:
    """Spans of one resource have one clock."""
    return repr(sorted((name, value) for name, value in span.resource.items() if name not in (SENT_AT, OFFSET)))


def _shifted(span: Span, offset: float) -> Span:
    resource = {name: value for name, value in span.resource.items() if name != SENT_AT}
    if abs(offset) < NOTICED_S or abs(offset) > 1e10:
        return replace(span, resource=resource)
    return replace(
        span,
        start_time=None if span.start_time is None else span.start_time + offset,
        end_time=None if span.end_time is None else span.end_time + offset,
        events=tuple(_events(span.events, offset)),
        resource={**resource, OFFSET: offset},
    )


def _events(events: Iterable[dict[str, object]], offset: float) -> Iterable[dict[str, object]]:
    for event in events:
        time = event.get("time")
        yield {**event, "time": time + offset} if isinstance(time, int | float) and time else event
