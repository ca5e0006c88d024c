"""What each request does, within one transaction: rows in, state machine, rows out.

`carry_out` is all that a store calls. It never waits: waiting is the store's business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, cast

from msgspec import UNSET
from msgspec.structs import force_setattr, replace

from ajet.schema.task import finite_reward
from ajet.store import requests as ask
from ajet.store import states
from ajet.store.errors import ConflictError, UnknownIdError
from ajet.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Page,
    Resources,
    Rollout,
    Span,
    Statistics,
)
from ajet.store.request_context import Context, answered, remember
from ajet.store.requests import AttemptRef, NewRollout, Request
from ajet.store.rows import Stored, StoredAttempt

EXPIRE_AT_ONCE = 500
"""Overdue attempts that one transaction handles, so that it doesn't keep others waiting."""
DELETE_AT_ONCE = 200
REWARD_NAME = re.compile(r"(^|\.)reward(\.\d+\.value)?$")
"""Attributes of a span that hold a reward."""


def carry_out(request: Request[Any], context: Context) -> Any:
    """Answer a request. Raises a StoreError, or AnsweredMeanwhile."""
    return _CARRY_OUT[type(request)](context, request)


# ---------------------------------------------------------------- rollouts


def _enqueue(context: Context, request: ask.Enqueue) -> list[Rollout]:
    if (answer := answered(context, request)) is not None:
        found = context.tables.rollouts(answer)
        return [found[rollout_id].rollout for rollout_id in answer if rollout_id in found]
    rollouts = _new_rollouts(context, request.rollouts)
    context.tables.add_rollouts(rollouts, queued=True)
    remember(context, request, [rollout.rollout_id for rollout in rollouts])
    return rollouts


def _new_rollouts(context: Context, wanted: Sequence[NewRollout]) -> list[Rollout]:
    latest: str | None = None
    if any(new.resources_id is None for new in wanted):
        found, _ = context.tables.query_resources(None, None, 1, 0)
        latest = found[0].resources_id if found else None
    for resources_id in {new.resources_id for new in wanted if new.resources_id is not None}:
        _known_resources(context, resources_id)
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


def _known_resources(context: Context, resources_id: str) -> list[Resources]:
    found, _ = context.tables.query_resources(resources_id, None, 1, 0)
    if not found:
        raise UnknownIdError(f"no resources {resources_id!r} in this store: publish them first")
    return found


def _claim(context: Context, request: ask.Claim) -> list[AttemptedRollout]:
    if (answer := answered(context, request)) is not None:
        return _still_wanted(context, dict(answer))
    taken = context.tables.take_queued(request.limit)
    _begin(context, taken, request.worker_id)
    context.tables.save(taken)
    worker = context.tables.worker(request.worker_id)
    if not taken:
        if worker.status != "idle" or worker.last_idle_time is None:
            context.tables.save_worker(states.idle(worker, context.now))
        return []
    assert taken[-1].attempt is not None
    context.tables.save_worker(states.busy(worker, taken[-1].attempt, context.now))
    claimed = [_attempted(one) for one in taken]
    remember(context, request, [(one.rollout.rollout_id, one.attempt.attempt_id) for one in taken if one.attempt])
    return claimed


def _still_wanted(context: Context, claimed: dict[str, str]) -> list[AttemptedRollout]:
    """What an earlier claim got, without what has gone to others or has ended since."""
    found = context.tables.rollouts(claimed)
    return [
        _attempted(one)
        for one in (found[rollout_id] for rollout_id in claimed if rollout_id in found)
        if one.attempt is not None
        and one.attempt.attempt_id == claimed[one.rollout.rollout_id]
        and one.attempt.status in states.ACTIVE
    ]


def _begin(context: Context, taken: Sequence[Stored], worker_id: str | None) -> None:
    """Start these rollouts' next attempts. The caller saves the rollouts."""
    for one in taken:
        one.attempts += 1
        attempt_id = f"at-{os.urandom(8).hex()}"
        one.rollout, one.attempt = states.begin(one.rollout, one.attempts, attempt_id, worker_id, context.now)
        one.owner = context.owner
    context.tables.add_attempts([(one, one.attempt) for one in taken if one.attempt is not None])


def _start_rollout(context: Context, request: ask.StartRollout) -> AttemptedRollout:
    if (answer := answered(context, request)) is not None:
        return _attempted(_stored(context, answer))
    (rollout,) = _new_rollouts(context, [request.rollout])
    context.tables.add_rollouts([rollout], queued=False)
    one = _stored(context, rollout.rollout_id)
    _begin(context, [one], request.worker_id)
    context.tables.save([one])
    remember(context, request, rollout.rollout_id)
    return _attempted(one)


def _start_attempt(context: Context, request: ask.StartAttempt) -> AttemptedRollout:
    if (answer := answered(context, request)) is not None:
        return _attempted(_stored(context, answer))
    one = _stored(context, request.rollout_id, change=True)
    if not states.may_restart(one.rollout):
        raise ConflictError(f"rollout {request.rollout_id} has {one.rollout.status}: it takes no further attempt")
    if one.attempt is not None:
        context.tables.save_attempts([(one, states.superseded(one.attempt, context.now))])
    _begin(context, [one], request.worker_id)
    context.tables.save([one])
    remember(context, request, request.rollout_id)
    return _attempted(one)


def _cancel(context: Context, request: ask.Cancel) -> list[Rollout]:
    found = _all_stored(context, request.rollout_ids, change=True)
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
    _save(context, changed)
    return [found[rollout_id].rollout for rollout_id in request.rollout_ids]


def _update_rollout(context: Context, request: ask.UpdateRollout) -> Rollout:
    one = _stored(context, request.rollout_id, change=True)
    given = {
        name: getattr(request, name)
        for name in ("input", "mode", "resources_id", "config", "metadata")
        if getattr(request, name) is not UNSET
    }
    if given.get("resources_id") is not None:
        _known_resources(context, given["resources_id"])
    one.rollout = replace(one.rollout, **given)
    context.tables.save_given(one)
    if "config" in given and one.attempt is not None:  # its deadline changes
        context.tables.save_attempts([(one, one.attempt)], context.listening_since)
    return one.rollout


def _wait(context: Context, request: ask.Wait) -> list[AttemptedRollout]:
    found = _all_stored(context, request.rollout_ids)
    return [_attempted(one) for one in found.values() if one.rollout.status in states.FINAL]


def _query_rollouts(context: Context, request: ask.QueryRollouts) -> Page[AttemptedRollout]:
    if request.rollout_ids is not None:
        _refuse_unknown(request.rollout_ids, context.tables.ended_among(request.rollout_ids)[0])
    found, total = context.tables.query_rollouts(
        ids=request.rollout_ids,
        statuses=request.status_in,
        modes=request.mode_in,
        id_contains=request.id_contains,
        sort_by=request.sort_by,
        descending=request.descending,
        limit=request.limit,
        offset=request.offset,
    )
    return Page(items=[_attempted(one) for one in found], total=total)


# ---------------------------------------------------------------- attempts


def _heartbeat(context: Context, request: ask.Heartbeat) -> list[Attempt]:
    known = _refer(context, {(one.rollout_id, one.attempt_id) for one in request.attempts})
    for reference in request.attempts:
        one, attempt = known[reference.rollout_id, reference.attempt_id]
        if attempt is one.attempt:
            _heard(context, one, span=False)
    _save_heard(context, {one.number: one for one, _ in known.values()}.values())
    worker = context.tables.worker(request.worker_id)
    context.tables.save_worker(replace(worker, last_heartbeat_time=context.now, heartbeat_stats=request.stats))
    return [_now(known, reference) for reference in request.attempts]


def _update_attempts(context: Context, request: ask.UpdateAttempts) -> list[Attempt]:
    known = _refer(context, {(one.rollout_id, one.attempt_id) for one in request.updates})
    answers, changed, bodies, freed = [], dict[int, Stored](), list[tuple[Stored, Attempt]](), set[str]()
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
            bodies.append((one, attempt))
        if attempt.end_time is not None and before.end_time is None and attempt.worker_id is not None:
            freed.add(attempt.worker_id)
        if attempt is not before:
            one.attempt = attempt
            known[update.rollout_id, update.attempt_id] = (one, attempt)
            changed[one.number] = one
        answers.append(attempt)
    context.tables.save_attempt_bodies(bodies)
    context.tables.save_attempts([(one, cast(Attempt, one.attempt)) for one in changed.values()])
    _save(context, changed.values())
    for worker_id in sorted(freed):
        context.tables.save_worker(states.idle(context.tables.worker(worker_id), context.now))
    return answers


def _given_body(update: ask.AttemptUpdate, before: Attempt, *, reported: bool) -> dict[str, Any]:
    """What to store of an update. A result that comes too late is not stored."""
    given: dict[str, Any] = {}
    in_time = reported or (update.status is UNSET and before.status in states.ACTIVE)
    if update.result is not UNSET and in_time:
        given["result"] = update.result
    if update.metadata is not UNSET and (reported or update.status is UNSET):
        given["metadata"] = update.metadata
    return given


def _query_attempts(context: Context, request: ask.QueryAttempts) -> list[Attempt]:
    one = _stored(context, request.rollout_id)
    context.must_own(one.owner, request.rollout_id)
    return [stored.attempt for stored in context.tables.attempts(one)]


def expire_overdue(context: Context) -> tuple[int, float | None]:
    """End attempts past their deadline. Returns how many were looked at, and when the next deadline is."""
    ids = context.tables.overdue(context.now, EXPIRE_AT_ONCE)
    changed = []
    for one in context.tables.rollouts(ids, change=True).values():
        attempt = one.attempt
        if attempt is None:
            continue
        status = states.overdue(one.rollout.config, attempt, context.now, context.listening_since)
        if status is None:  # it was heard of meanwhile, or nobody listened
            context.tables.save_attempts([(one, attempt)], context.listening_since)
            continue
        expired = cast("Literal[AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE]", status)
        one.rollout, one.attempt = states.expire(one.rollout, attempt, expired, context.now)
        context.tables.save_attempts([(one, one.attempt)])
        if attempt.worker_id is not None:
            context.tables.save_worker(states.lost(context.tables.worker(attempt.worker_id)))
        changed.append(one)
    _save(context, changed)
    return len(ids), context.tables.next_deadline()


# ---------------------------------------------------------------- spans


def _add_spans(context: Context, request: ask.AddSpans) -> int:
    together: dict[tuple[str, str], list[Span]] = {}
    for span in request.spans:
        _check_rewards(span)
        together.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    known = _refer(context, together)
    batches = []
    for reference, spans in together.items():
        one, attempt = known[reference]
        if new := _new_spans(context, one, attempt, spans):
            batches.append((one, attempt.sequence_id, new))
        if attempt is one.attempt:
            _heard(context, one, span=True)
    context.tables.add_spans(batches)
    _save_heard(context, {one.number: one for one, _ in known.values()}.values())
    return sum(len(new) for _, _, new in batches)


def _new_spans(context: Context, one: Stored, attempt: Attempt, spans: Iterable[Span]) -> list[Span]:
    """Those that the store doesn't know, numbered: the request's spans are this store's own copies."""
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


def _check_rewards(span: Span) -> None:
    for name, value in span.attributes.items():
        if "reward" in name and type(value) is not float and REWARD_NAME.search(name):  # floats are finite: `wire`
            finite_reward(value, f"span {span.span_id}: the attribute {name!r}")


def _next_sequence_ids(context: Context, request: ask.NextSequenceIds) -> list[int]:
    one = _stored(context, request.rollout_id, change=True)
    context.must_own(one.owner, request.rollout_id)
    first = one.spans + 1
    one.spans += request.count
    context.tables.save([one])
    return list(range(first, first + request.count))


def _query_spans(context: Context, request: ask.QuerySpans) -> Page[Span]:
    one = _stored(context, request.rollout_id)
    context.must_own(one.owner, request.rollout_id)
    sequence = None
    if request.attempt_id == "latest":
        sequence = one.attempts
    elif request.attempt_id is not None:
        sequence = _find_attempt(context, one, request.attempt_id).attempt.sequence_id
    found = [
        span
        for span in context.tables.spans(one.number, sequence)
        if (request.name is None or span.name == request.name)
        and request.name_contains in span.name
        and (request.trace_id is None or span.trace_id == request.trace_id)
        and (request.parent_id is None or span.parent_id == request.parent_id)
    ]
    return Page(items=found[request.offset : request.offset + request.limit], total=len(found))


# ---------------------------------------------------------------- resources, workers, statistics


def _publish_resources(context: Context, request: ask.PublishResources) -> Resources:
    if (answer := answered(context, request)) is not None:
        return context.tables.query_resources(answer[0], answer[1], 1, 0)[0][0]
    resources_id = request.resources_id or f"rs-{os.urandom(6).hex()}"
    before, _ = context.tables.query_resources(resources_id, None, 1, 0)
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


def _query_resources(context: Context, request: ask.QueryResources) -> Page[Resources]:
    found, total = context.tables.query_resources(request.resources_id, request.version, request.limit, request.offset)
    if request.resources_id is not None and not total:
        raise UnknownIdError(
            f"no resources {request.resources_id!r}"
            + ("" if request.version is None else f" of version {request.version}")
        )
    return Page(items=found, total=total)


def _query_workers(context: Context, request: ask.QueryWorkers) -> Page[Any]:
    found, total = context.tables.query_workers(request.status_in, request.id_contains, request.limit, request.offset)
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


# ---------------------------------------------------------------- shared


def _refer(context: Context, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], tuple[Stored, Attempt]]:
    """The attempts that are meant, each with its rollout. The latest one is the rollout's own object."""
    rollouts = _all_stored(context, {rollout_id for rollout_id, _ in wanted}, change=True, inputs=False)
    found = {}
    for rollout_id, attempt_id in wanted:
        one = rollouts[rollout_id]
        if one.attempt is not None and one.attempt.attempt_id == attempt_id:
            attempt, owner = one.attempt, one.owner
        else:
            attempt, owner = _find_attempt(context, one, attempt_id)
        context.must_own(owner, rollout_id)
        found[rollout_id, attempt_id] = (one, attempt)
    return found


def _find_attempt(context: Context, one: Stored, attempt_id: str) -> StoredAttempt:
    for stored in context.tables.attempts(one):
        if stored.attempt.attempt_id == attempt_id:
            return stored
    raise UnknownIdError(f"rollout {one.rollout.rollout_id} has no attempt {attempt_id!r}")


def _now(known: dict[tuple[str, str], tuple[Stored, Attempt]], reference: AttemptRef) -> Attempt:
    one, attempt = known[reference.rollout_id, reference.attempt_id]
    latest = one.attempt
    return latest if latest is not None and latest.attempt_id == attempt.attempt_id else attempt


def _heard(context: Context, one: Stored, *, span: bool) -> None:
    assert one.attempt is not None
    one.rollout, one.attempt = states.heard(one.rollout, one.attempt, context.now, span=span)


def _save_heard(context: Context, heard: Iterable[Stored]) -> None:
    heard = list(heard)
    context.tables.save_attempts([(one, one.attempt) for one in heard if one.attempt is not None])
    context.tables.save(heard)


def _save(context: Context, changed: Iterable[Stored]) -> None:
    """Save rollouts, and tell of those that have ended."""
    changed = list(changed)
    context.tables.save(changed)
    context.tables.events.ended |= {one.rollout.rollout_id for one in changed if one.rollout.status in states.FINAL}


def _all_stored(
    context: Context, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True
) -> dict[str, Stored]:
    rollout_ids = list(rollout_ids)
    found = context.tables.rollouts(rollout_ids, change=change, inputs=inputs)
    _refuse_unknown(rollout_ids, found.keys())
    return found


def _refuse_unknown(wanted: Iterable[str], known: Iterable[str]) -> None:
    missing = sorted(set(wanted).difference(known))
    if missing:
        shown = ", ".join(map(ascii, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UnknownIdError(f"no rollout {shown} in this store: never enqueued, or deleted to make room")


def _stored(context: Context, rollout_id: str, *, change: bool = False) -> Stored:
    return _all_stored(context, [rollout_id], change=change)[rollout_id]


def _attempted(one: Stored) -> AttemptedRollout:
    return AttemptedRollout(rollout=one.rollout, attempt=one.attempt)


_CARRY_OUT: dict[type[Request[Any]], Callable[[Context, Any], Any]] = {
    ask.Enqueue: _enqueue,
    ask.Claim: _claim,
    ask.StartRollout: _start_rollout,
    ask.StartAttempt: _start_attempt,
    ask.Cancel: _cancel,
    ask.UpdateRollout: _update_rollout,
    ask.Wait: _wait,
    ask.QueryRollouts: _query_rollouts,
    ask.Heartbeat: _heartbeat,
    ask.UpdateAttempts: _update_attempts,
    ask.QueryAttempts: _query_attempts,
    ask.AddSpans: _add_spans,
    ask.NextSequenceIds: _next_sequence_ids,
    ask.QuerySpans: _query_spans,
    ask.PublishResources: _publish_resources,
    ask.QueryResources: _query_resources,
    ask.QueryWorkers: _query_workers,
    ask.GetStatistics: _statistics,
}
