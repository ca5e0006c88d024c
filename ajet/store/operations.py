"""What each request does, within one transaction: rows in, state machine, rows out.

`carry_out` is all that a store calls. It never waits: waiting is the store's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from msgspec import UNSET
from msgspec.structs import force_setattr, replace

from ajet.observe.tracing import with_valid_reward
from ajet.schema.span import Span
from ajet.store import requests as ask
from ajet.store import states
from ajet.store.context import (
    Context,
    all_stored,
    answered,
    attempted,
    begin,
    find_attempt,
    heard,
    refer,
    remember,
    stored,
    write,
    write_heard,
)
from ajet.store.records import (
    Attempt,
    AttemptedRollout,
    Page,
    Resources,
    Rollout,
    Statistics,
    Worker,
)
from ajet.store.requests import ConflictError, NewRollout, StoreRequest, UnknownIdError
from ajet.store.rows import Stored

EXPIRE_AT_ONCE = 500
"""Overdue attempts that one transaction handles, so that it doesn't keep others waiting."""


def claim(context: Context, request: ask.Claim) -> list[AttemptedRollout]:
    if (answer := answered(context, request)) is not None:
        return _still_wanted(context, dict(answer))
    taken = context.tables.head_of_queue(request.limit)
    begin(context, taken, request.worker_id)
    write(context, taken)
    if not taken:
        worker = context.tables.worker(request.worker_id)
        if worker.status != "idle" or worker.last_idle_time is None:
            context.tables.save_worker(states.idle(worker, context.now))
        return []
    claimed = [attempted(one) for one in taken]
    remember(context, request, [(one.rollout.rollout_id, one.attempt.attempt_id) for one in taken if one.attempt])
    return claimed


def _still_wanted(context: Context, claimed: dict[str, str]) -> list[AttemptedRollout]:
    """Return what an earlier claim got, without what has ended since or was claimed by others."""
    found = context.tables.rollouts(claimed)
    return [
        attempted(one)
        for one in (found[rollout_id] for rollout_id in claimed if rollout_id in found)
        if one.attempt is not None
        and one.attempt.attempt_id == claimed[one.rollout.rollout_id]
        and one.attempt.status in states.ACTIVE
    ]


def start_attempt(context: Context, request: ask.StartAttempt) -> AttemptedRollout:
    if (answer := answered(context, request)) is not None:
        return attempted(stored(context, answer))
    one = stored(context, request.rollout_id, change=True)
    if not states.may_restart(one.rollout):
        raise ConflictError(f"rollout {request.rollout_id} has {one.rollout.status}: it takes no further attempt")
    if one.attempt is not None:
        context.tables.save_attempts([(one, states.superseded(one.attempt, context.now))])
    begin(context, [one], request.worker_id)
    write(context, [one])
    remember(context, request, request.rollout_id)
    return attempted(one)


def heartbeat(context: Context, request: ask.Heartbeat) -> list[Attempt]:
    known = refer(context, {(one.rollout_id, one.attempt_id) for one in request.attempts})
    for reference in request.attempts:
        key = reference.rollout_id, reference.attempt_id
        one, attempt = known[key]
        if attempt is one.attempt:
            known[key] = one, heard(context, one, span=False)
    write_heard(context, known)
    worker = context.tables.worker(request.worker_id)
    context.tables.save_worker(replace(worker, last_heartbeat_time=context.now, heartbeat_stats=request.stats))
    return [known[reference.rollout_id, reference.attempt_id][1] for reference in request.attempts]


def update_attempts(context: Context, request: ask.UpdateAttempts) -> list[Attempt]:
    known = refer(context, {(one.rollout_id, one.attempt_id) for one in request.updates})
    answers, changed, bodies, freed = [], dict[int, Stored](), list[tuple[Stored, Attempt, Attempt]](), set[str]()
    for update in request.updates:
        one, attempt = known[update.rollout_id, update.attempt_id]
        if attempt is not one.attempt:  # a newer one counts
            answers.append(attempt)
            continue
        before = attempt
        if update.status is not UNSET:
            one.rollout, attempt = states.report(one.rollout, attempt, update.status, context.now)
        body = _given_body(update, before, reported=attempt is not before)
        if body:
            attempt = replace(attempt, **body)
            bodies.append((one, before, attempt))
        if attempt.end_time is not None and before.end_time is None and attempt.worker_id is not None:
            freed.add(attempt.worker_id)
        if attempt is not before:
            one.attempt = attempt
            known[update.rollout_id, update.attempt_id] = (one, attempt)
            changed[one.number] = one
        answers.append(attempt)
    context.tables.save_attempt_bodies(bodies)
    context.tables.save_attempts([(one, cast(Attempt, one.attempt)) for one in changed.values()])
    write(context, list(changed.values()))
    for worker_id in sorted(freed):
        context.tables.save_worker(states.idle(context.tables.worker(worker_id), context.now))
    return answers


def _given_body(update: ask.AttemptUpdate, before: Attempt, *, reported: bool) -> dict[str, Any]:
    """Return the fields of an update to store. A result that comes too late is dropped."""
    given: dict[str, Any] = {}
    in_time = reported or (update.status is UNSET and before.status in states.ACTIVE)
    if update.result is not UNSET and in_time:
        given["result"] = update.result
    if update.metadata is not UNSET and (reported or update.status is UNSET):
        given["metadata"] = update.metadata
    return given


def query_attempts(context: Context, request: ask.QueryAttempts) -> list[Attempt]:
    one = stored(context, request.rollout_id)
    context.must_own(one.owner, request.rollout_id)
    return [each.attempt for each in context.tables.attempts(one)]


def expire_overdue(context: Context) -> tuple[int, float | None]:
    """End attempts past their deadline. Returns how many were looked at, and when the next deadline is."""
    ids = context.tables.overdue(context.now, EXPIRE_AT_ONCE)
    changed = []
    for one in context.tables.rollouts(ids, change=True).values():
        attempt = one.attempt
        if attempt is None:
            continue
        status = states.overdue(one.rollout.config, attempt, context.now, context.listening_since)
        if status is None:  # it gave a sign of life meanwhile, or the store has only just opened
            context.tables.save_attempts([(one, attempt)], context.listening_since)
            continue
        one.rollout, one.attempt = states.expire(one.rollout, attempt, status, context.now)
        context.tables.save_attempts([(one, one.attempt)])
        if attempt.worker_id is not None:
            context.tables.save_worker(states.lost(context.tables.worker(attempt.worker_id)))
        changed.append(one)
    write(context, changed)
    return len(ids), context.tables.next_deadline()


def add_spans(context: Context, request: ask.AddSpans) -> int:
    together: dict[tuple[str, str], list[Span]] = {}
    for span in map(with_valid_reward, request.spans):
        together.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    known = refer(context, together)
    batches = []
    for reference, spans in together.items():
        one, attempt = known[reference]
        if new := _new_spans(context, one, attempt, spans):
            batches.append((one, attempt.sequence_id, new))
        if attempt is one.attempt:
            heard(context, one, span=True)
    context.tables.add_spans(batches)
    write_heard(context, known)
    return sum(len(new) for _, _, new in batches)


def _new_spans(context: Context, one: Stored, attempt: Attempt, spans: Iterable[Span]) -> list[Span]:
    """Return the spans that the store doesn't have yet, and number them. They are the store's own copies."""
    seen = context.tables.span_ids(one.number, attempt.sequence_id) if one.spans else set()
    last, new = one.spans, []
    for span in spans:
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        if not span.sequence_id:
            force_setattr(span, "sequence_id", last + 1)
        if span.sequence_id > last:
            last = span.sequence_id
        new.append(span)
    one.spans = last
    return new


def next_sequence_ids(context: Context, request: ask.NextSequenceIds) -> list[int]:
    one = stored(context, request.rollout_id, change=True)
    context.must_own(one.owner, request.rollout_id)
    first = one.spans + 1
    one.spans += request.count
    write(context, [one])
    return list(range(first, first + request.count))


def query_spans(context: Context, request: ask.QuerySpans) -> Page[Span]:
    one = stored(context, request.rollout_id)
    context.must_own(one.owner, request.rollout_id)
    sequence = None
    if request.attempt_id == "latest":
        sequence = one.attempts
    elif request.attempt_id is not None:
        sequence = find_attempt(context, one, request.attempt_id).attempt.sequence_id
    found = [
        span
        for span in context.tables.spans(one.number, sequence)
        if (request.name is None or span.name == request.name)
        and request.name_contains in span.name
        and (request.trace_id is None or span.trace_id == request.trace_id)
        and (request.parent_id is None or span.parent_id == request.parent_id)
    ]
    return Page(items=found[request.offset : request.offset + request.limit], total=len(found))


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


def refuse_unknown_resources(context: Context, resources_id: str) -> None:
    if not _versions(context, resources_id):
        raise UnknownIdError(f"no resources {resources_id!r} in this store: publish them first")


def _versions(context: Context, resources_id: str | None = None, version: int | None = None) -> list[Resources]:
    """Find the newest of these versions; the list is empty if there is none."""
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
    from_now = any(new.resources_id is None for new in wanted)
    latest = next((one.resources_id for one in _versions(context)), None) if from_now else None
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
    write(context, changed)
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
    context.tables.save_given(one, replace(one.rollout, **given))
    if "config" in given and one.attempt is not None:  # its deadline changes
        context.tables.save_attempts([(one, one.attempt)], context.listening_since)
    return one.rollout


def wait(context: Context, request: ask.Wait) -> list[AttemptedRollout]:
    found = all_stored(context, request.rollout_ids)
    return [attempted(one) for one in found.values() if one.rollout.status in states.FINAL]


def query_rollouts(context: Context, request: ask.QueryRollouts) -> Page[AttemptedRollout]:
    if request.rollout_ids is not None:
        all_stored(context, request.rollout_ids, inputs=False)
    found, total = context.tables.query_rollouts(request)
    return Page(items=[attempted(one) for one in found], total=total)


DELETE_AT_ONCE = 200
"""Rollouts that one transaction deletes, so that it doesn't keep others waiting."""


def carry_out(request: StoreRequest[Any], context: Context) -> Any:
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


_CARRY_OUT: dict[type[StoreRequest[Any]], Callable[[Context, Any], Any]] = {
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
