"""`Context`: the transaction and the caller of a request, and the earlier answer if the request is a retry.

It also finds the rollouts that a request concerns, and writes them back. All operations share it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ajet.store import states
from ajet.store.records import Attempt, AttemptedRollout
from ajet.store.requests import NotAllowedError, Role, UnknownIdError
from ajet.store.rows import Stored, StoredAttempt
from ajet.store.tables import Tables


class AnsweredMeanwhile(Exception):
    """Another transaction answered the same request: roll this one back, and return that answer."""


@dataclass(frozen=True, slots=True)
class StoreCaller:
    """The key that sent a request. Programs that use the store directly have none."""

    name: str
    roles: frozenset[Role]

    @property
    def sees_own_only(self) -> bool:
        return self.roles == {Role.RUNNER}


@dataclass(frozen=True, slots=True)
class Context:
    """The transaction, the time and the caller of one request."""

    tables: Tables
    now: float
    listening_since: float
    """When the store opened: heartbeats could not arrive before that."""
    caller: StoreCaller | None = None

    def must_own(self, owner: str | None, rollout_id: str) -> None:
        if self.caller is not None and self.caller.sees_own_only and owner != self.caller.name:
            raise NotAllowedError(f"rollout {rollout_id} was not claimed with this key")

    @property
    def owner(self) -> str | None:
        return None if self.caller is None else self.caller.name


class Repeatable(Protocol):
    @property
    def request_id(self) -> str | None: ...


def _scoped(context: Context, request: Repeatable) -> str:
    """The request id, scoped by key and kind of request: equal ids of different keys or kinds are different
    requests."""
    return f"{type(request).__name__} {context.owner or ''} {request.request_id}"


def answered(context: Context, request: Repeatable) -> Any:
    """The earlier answer to this request; None if it is new."""
    if request.request_id is None:
        return None
    answer = context.tables.answered(_scoped(context, request))
    return None if answer is None else msgspec.json.decode(answer)


def remember(context: Context, request: Repeatable, answer: Any) -> None:
    if request.request_id is None:
        return
    if not context.tables.remember(_scoped(context, request), msgspec.json.encode(answer), context.now):
        raise AnsweredMeanwhile


Attempts = dict[tuple[str, str], tuple[Stored, Attempt]]
"""The stored attempts, by rollout and attempt id."""


def stored(context: Context, rollout_id: str, *, change: bool = False) -> Stored:
    return all_stored(context, [rollout_id], change=change)[rollout_id]


def all_stored(
    context: Context, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True
) -> dict[str, Stored]:
    rollout_ids = list(rollout_ids)
    found = context.tables.rollouts(rollout_ids, change=change, inputs=inputs)
    if missing := sorted(set(rollout_ids).difference(found)):
        shown = ", ".join(map(ascii, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UnknownIdError(f"no rollout {shown} in this store: never enqueued, or deleted to make room")
    return found


def refer(context: Context, wanted: Collection[tuple[str, str]]) -> Attempts:
    """Find these attempts, each with its rollout. A latest attempt is the same object as its rollout's `attempt`."""
    rollouts = all_stored(context, {rollout_id for rollout_id, _ in wanted}, change=True, inputs=False)
    found = {}
    for rollout_id, attempt_id in wanted:
        one = rollouts[rollout_id]
        if one.attempt is not None and one.attempt.attempt_id == attempt_id:
            attempt, owner = one.attempt, one.owner
        else:
            attempt, owner = find_attempt(context, one, attempt_id)
        context.must_own(owner, rollout_id)
        found[rollout_id, attempt_id] = (one, attempt)
    return found


def find_attempt(context: Context, one: Stored, attempt_id: str) -> StoredAttempt:
    for each in context.tables.attempts(one):
        if each.attempt.attempt_id == attempt_id:
            return each
    raise UnknownIdError(f"rollout {one.rollout.rollout_id} has no attempt {attempt_id!r}")


def begin(context: Context, taken: Sequence[Stored], worker_id: str | None) -> None:
    """Start these rollouts' next attempts; the worker is busy with the last one. The caller saves the rollouts."""
    attempt = None
    for one in taken:
        one.attempts += 1
        attempt_id = f"at-{os.urandom(8).hex()}"
        one.rollout, attempt = states.begin(one.rollout, one.attempts, attempt_id, worker_id, context.now)
        one.attempt, one.owner = attempt, context.owner
    context.tables.add_attempts([(one, one.attempt) for one in taken if one.attempt is not None])
    if worker_id is not None and attempt is not None:
        context.tables.save_worker(states.busy(context.tables.worker(worker_id), attempt, context.now))


def heard(context: Context, one: Stored, *, span: bool) -> Attempt:
    assert one.attempt is not None
    one.rollout, one.attempt = states.heard(one.rollout, one.attempt, context.now, span=span)
    return one.attempt


def write(context: Context, changed: Sequence[Stored]) -> None:
    """Write rollouts back, and notify those that wait for the ones that have ended. Those to be retried go to the end
    of the queue."""
    place: int | None = None
    for one in changed:
        if one.rollout.status not in states.QUEUED:
            one.queue = None
        elif one.queue is None:
            one.queue = place = (context.tables.last_place() if place is None else place) + 1
            context.tables.events.queued += 1
    context.tables.save(changed)
    context.tables.events.ended |= {one.rollout.rollout_id for one in changed if one.rollout.status in states.FINAL}


def write_heard(context: Context, known: Attempts) -> None:
    """Write back the attempts that gave a sign of life."""
    changed = list({one.number: one for one, _ in known.values()}.values())
    context.tables.save_attempts([(one, one.attempt) for one in changed if one.attempt is not None])
    write(context, changed)


def attempted(one: Stored) -> AttemptedRollout:
    return AttemptedRollout(rollout=one.rollout, attempt=one.attempt)
