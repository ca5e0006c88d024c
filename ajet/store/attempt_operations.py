"""Requests about attempts and their spans, carried out: claim, start, heartbeat, update, add spans, query.

And what becomes of overdue attempts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, cast

from msgspec import UNSET
from msgspec.structs import force_setattr, replace

from ajet.schema.task import finite_reward
from ajet.store import requests as ask
from ajet.store import states
from ajet.store.context import (
    Attempts,
    Context,
    answered,
    attempted,
    begin,
    find_attempt,
    heard,
    refer,
    remember,
    stored,
    write,
    write_ended,
    write_heard,
)
from ajet.store.errors import ConflictError
from ajet.store.records import Attempt, AttemptedRollout, AttemptStatus, Page, Span
from ajet.store.requests import AttemptRef
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
    """What an earlier claim got, without what has gone to others or has ended since."""
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
        one, attempt = known[reference.rollout_id, reference.attempt_id]
        if attempt is one.attempt:
            heard(context, one, span=False)
    write_heard(context, known)
    worker = context.tables.worker(request.worker_id)
    context.tables.save_worker(replace(worker, last_heartbeat_time=context.now, heartbeat_stats=request.stats))
    return [_now(known, reference) for reference in request.attempts]


def _now(known: Attempts, reference: AttemptRef) -> Attempt:
    one, attempt = known[reference.rollout_id, reference.attempt_id]
    latest = one.attempt
    return latest if latest is not None and latest.attempt_id == attempt.attempt_id else attempt


def update_attempts(context: Context, request: ask.UpdateAttempts) -> list[Attempt]:
    known = refer(context, {(one.rollout_id, one.attempt_id) for one in request.updates})
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
    write_ended(context, list(changed.values()))
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
        if status is None:  # it was heard of meanwhile, or nobody listened
            context.tables.save_attempts([(one, attempt)], context.listening_since)
            continue
        expired = cast("Literal[AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE]", status)
        one.rollout, one.attempt = states.expire(one.rollout, attempt, expired, context.now)
        context.tables.save_attempts([(one, one.attempt)])
        if attempt.worker_id is not None:
            context.tables.save_worker(states.lost(context.tables.worker(attempt.worker_id)))
        changed.append(one)
    write_ended(context, changed)
    return len(ids), context.tables.next_deadline()


REWARD_NAME = re.compile(r"(^|\.)reward(\.\d+\.value)?$")
"""Attributes of a span that hold a reward."""


def add_spans(context: Context, request: ask.AddSpans) -> int:
    together: dict[tuple[str, str], list[Span]] = {}
    for span in request.spans:
        _check_rewards(span)
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
