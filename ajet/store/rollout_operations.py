"""Requests about rollouts, carried out: enqueue, start, cancel, update, wait, query."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from ajet.store import requests as ask
from ajet.store import states
from ajet.store.records import AttemptedRollout, Page, Rollout
from ajet.store.request_context import Context, answered, remember
from ajet.store.requests import NewRollout
from ajet.store.resource_operations import latest_resources_id, refuse_unknown_resources
from ajet.store.stored_rollouts import (
    all_stored,
    attempted,
    begin,
    refuse_unknown,
    stored,
    write,
    write_ended,
)


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
