"""What each request does, within one transaction: rows in, state machine, rows out.

`carry_out` is all that a store calls. It never waits: waiting is the store's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ajet.store import requests as ask
from ajet.store import states
from ajet.store.attempt_operations import (
    add_spans,
    claim,
    heartbeat,
    next_sequence_ids,
    query_attempts,
    query_spans,
    start_attempt,
    update_attempts,
)
from ajet.store.context import (
    Context,
    all_stored,
    answered,
    attempted,
    begin,
    refuse_unknown,
    remember,
    stored,
    write,
    write_ended,
)
from ajet.store.errors import UnknownIdError
from ajet.store.records import AttemptedRollout, Page, Resources, Rollout, Statistics, Worker
from ajet.store.requests import NewRollout, Request


def publish_resources(context: Context, request: ask.PublishResources) -> Resources:
    if (answer := answered(context, request)) is not None:
        return _versions(context, answer[0], answer[1])[0]
    resources_id = request.resources_id or f"rs-{os.urandom(6).hex()}"
    before = _versions(context, resources_id)
    resources = Resources(
        resources_id=resources_id,
        version=before[0].version + 1 if before else 1,
        create_time=before[0].create_time if before else context.now,
        update_time=context.now,
        resources=request.resources,
    )
    context.tables.add_resources(resources)
    remember(context, request, (resources_id, resources.version))
    return resources


def query_resources(context: Context, request: ask.QueryResources) -> Page[Resources]:
    found, total = context.tables.query_resources(request)
    if request.resources_id is not None and not total:
        raise UnknownIdError(
            f"no resources {request.resources_id!r}"
            + ("" if request.version is None else f" of version {request.version}")
        )
    return Page(items=found, total=total)


def latest_resources_id(context: Context) -> str | None:
    """Of what was published last."""
    found = _versions(context)
    return found[0].resources_id if found else None


def refuse_unknown_resources(context: Context, resources_id: str) -> None:
    if not _versions(context, resources_id):
        raise UnknownIdError(f"no resources {resources_id!r} in this store: publish them first")


def _versions(context: Context, resources_id: str | None = None, version: int | None = None) -> list[Resources]:
    """The newest of these, if there are any."""
    return context.tables.query_resources(ask.QueryResources(resources_id=resources_id, version=version, limit=1))[0]


def enqueue(context: Context, request: ask.Enqueue) -> list[Rollout]:
    if (answer := answered(context, request)) is not None:
        found = context.tables.rollouts(answer)
        return [found[rollout_id].rollout for rollout_id in answer if rollout_id in found]
    rollouts = _new_rollouts(context, request.rollouts)
    context.tables.add_rollouts(rollouts, context.tables.last_place() + 1)
    context.tables.events.queued += len(rollouts)
    remember(context, request, [rollout.rollout_id for rollout in rollouts])
    return rollouts


def start_rollout(context: Context, request: ask.StartRollout) -> AttemptedRollout:
    if (answer := answered(context, request)) is not None:
        return attempted(stored(context, answer))
    (rollout,) = _new_rollouts(context, [request.rollout])
    context.tables.add_rollouts([rollout], None)
    one = stored(context, rollout.rollout_id)
    begin(context, [one], request.worker_id)
    write(context, [one])
    remember(context, request, rollout.rollout_id)
    return attempted(one)


def _new_rollouts(context: Context, wanted: Sequence[NewRollout]) -> list[Rollout]:
    latest = latest_resources_id(context) if any(new.resources_id is None for new in wanted) else None
    for resources_id in {new.resources_id for new in wanted if new.resources_id is not None}:
        refuse_unknown_resources(context, resources_id)
    return [
        Rollout(
            rollout_id=f"ro-{os.urandom(10).hex()}",
            input=new.input,
            start_time=context.now,
            mode=new.mode,
            resources_id=new.resources_id or latest,
            config=new.config,
            metadata=new.metadata,
        )
        for new in wanted
    ]


def cancel(context: Context, request: ask.Cancel) -> list[Rollout]:
    found = all_stored(context, request.rollout_ids, change=True)
    changed = []
    for one in found.values():
        rollout, attempt = states.cancel(one.rollout, one.attempt, context.now)
        if rollout is one.rollout:
            continue
        one.rollout = rollout
        changed.append(one)
        if attempt is not None and attempt is not one.attempt:
            one.attempt = attempt
            context.tables.save_attempts([(one, attempt)])
    write_ended(context, changed)
    return [found[rollout_id].rollout for rollout_id in request.rollout_ids]


def update_rollout(context: Context, request: ask.UpdateRollout) -> Rollout:
    one = stored(context, request.rollout_id, change=True)
    given = {
        name: getattr(request, name)
        for name in ("input", "mode", "resources_id", "config", "metadata")
        if getattr(request, name) is not UNSET
    }
    if given.get("resources_id") is not None:
        refuse_unknown_resources(context, given["resources_id"])
    one.rollout = replace(one.rollout, **given)
    context.tables.save_given(one)
    if "config" in given and one.attempt is not None:  # its deadline changes
        context.tables.save_attempts([(one, one.attempt)], context.listening_since)
    return one.rollout


def wait(context: Context, request: ask.Wait) -> list[AttemptedRollout]:
    found = all_stored(context, request.rollout_ids)
    return [attempted(one) for one in found.values() if one.rollout.status in states.FINAL]


def query_rollouts(context: Context, request: ask.QueryRollouts) -> Page[AttemptedRollout]:
    if request.rollout_ids is not None:
        refuse_unknown(request.rollout_ids, context.tables.known(request.rollout_ids))
    found, total = context.tables.query_rollouts(request)
    return Page(items=[attempted(one) for one in found], total=total)


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
