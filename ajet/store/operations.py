"""What each request does, within one transaction: rows in, state machine, rows out.

`carry_out` is all that a store calls. It never waits: waiting is the store's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ajet.store import requests as ask
from ajet.store.attempt_operations import (
    claim,
    heartbeat,
    query_attempts,
    start_attempt,
    update_attempts,
)
from ajet.store.records import Page, Statistics, Worker
from ajet.store.request_context import Context
from ajet.store.requests import Request
from ajet.store.resource_operations import publish_resources, query_resources
from ajet.store.rollout_operations import (
    cancel,
    enqueue,
    query_rollouts,
    start_rollout,
    update_rollout,
    wait,
)
from ajet.store.span_operations import add_spans, next_sequence_ids, query_spans

DELETE_AT_ONCE = 200
"""Rollouts that one transaction deletes, so that it doesn't keep others waiting."""


def carry_out(request: Request[Any], context: Context) -> Any:
    """Answer a request. Raises a StoreError, or AnsweredMeanwhile."""
    return _CARRY_OUT[type(request)](context, request)


def _query_workers(context: Context, request: ask.QueryWorkers) -> Page[Worker]:
    found, total = context.tables.query_workers(request)
    return Page(items=found, total=total)


def _statistics(context: Context, request: ask.GetStatistics) -> Statistics:
    tables = context.tables
    return Statistics(
        rollouts=tables.counts("rollout"), workers=tables.counts("worker"), stored_bytes=tables.stored_bytes()
    )


def delete_old(context: Context, keep_seconds: float | None, keep_bytes: int | None) -> int:
    """Delete some of what is too old or too much. Returns how many rollouts; fewer than DELETE_AT_ONCE: no more."""
    numbers: list[int] = []
    if keep_seconds is not None:
        numbers = [number for number, _ in context.tables.oldest_ended(context.now - keep_seconds, DELETE_AT_ONCE)]
    if keep_bytes is not None and len(numbers) < DELETE_AT_ONCE:
        surplus = context.tables.stored_bytes() - keep_bytes
        for number, size in context.tables.oldest_ended(context.now, DELETE_AT_ONCE):
            if surplus <= 0:
                break
            surplus -= size
            if number not in numbers:
                numbers.append(number)
    context.tables.delete(numbers)
    return len(numbers)


_CARRY_OUT: dict[type[Request[Any]], Callable[[Context, Any], Any]] = {
    ask.Enqueue: enqueue,
    ask.Claim: claim,
    ask.StartRollout: start_rollout,
    ask.StartAttempt: start_attempt,
    ask.Cancel: cancel,
    ask.UpdateRollout: update_rollout,
    ask.Wait: wait,
    ask.QueryRollouts: query_rollouts,
    ask.Heartbeat: heartbeat,
    ask.UpdateAttempts: update_attempts,
    ask.QueryAttempts: query_attempts,
    ask.AddSpans: add_spans,
    ask.NextSequenceIds: next_sequence_ids,
    ask.QuerySpans: query_spans,
    ask.PublishResources: publish_resources,
    ask.QueryResources: query_resources,
    ask.QueryWorkers: _query_workers,
    ask.GetStatistics: _statistics,
}
