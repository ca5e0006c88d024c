"""Times of spans that another machine's clock has told."""

from __future__ import annotations

from typing import Any

import pytest

from ajet.observe.tracing.attributes import OFFSET, SENT_AT, by_our_clock
from ajet.schema.span import Span


def span(start: float, end: float, **resource: Any) -> Span:
    ids = {"rollout_id": "r", "attempt_id": "a", "span_id": f"s{start}"}
    return Span(**ids, name="x", start_time=start, end_time=end, resource=resource)


@pytest.mark.parametrize("offset", [-3600.0, 3600.0])
def test_a_sender_that_says_when_it_sent(offset: float) -> None:
    first, second = by_our_clock(
        [span(90 + offset, 95 + offset, **{SENT_AT: 100 + offset}), span(98, 99, host="y")], 100.0
    )
    assert (first.start_time, first.end_time) == pytest.approx((90, 95))
    assert first.resource == {OFFSET: -offset}
    assert (second.start_time, second.resource) == (98, {"host": "y"}), "another clock"


def test_a_sender_that_is_ahead() -> None:
    first, second = by_our_clock([span(3700, 3705, host="x"), span(3706, 3710, host="x")], 100.0)
    assert (first.start_time, second.end_time) == (90.0, 100.0)


@pytest.mark.parametrize("said", ["now", True, float("inf"), float("nan"), -1e300])
def test_what_makes_no_sense_changes_nothing(said: Any) -> None:
    (one,) = by_our_clock([span(90, 95, **{SENT_AT: said})], 100.0)
    assert (one.start_time, one.end_time) == (90, 95)
