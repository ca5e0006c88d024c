"""The state machine: pure functions from a rollout and its attempt to what they become after an event.

    rollout   queuing → preparing → running → succeeded | failed | cancelled
                            └──────────┴────→ requeuing → preparing …
    attempt   preparing → running → succeeded | failed | cancelled
                  └──────────┴────→ timeout | unresponsive

Final statuses stay, whatever arrives later; only `restart` takes a failed rollout up again. Only the latest attempt
changes its rollout. An unresponsive attempt goes on with its next sign of life, unless its rollout was claimed by
another runner meanwhile; a timeout is final.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec.structs import replace

from ajet.store.records import (
    Attempt,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    WorkerStatus,
)

FINAL = (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED)
QUEUED = (RolloutStatus.QUEUING, RolloutStatus.REQUEUING)
ACTIVE = (AttemptStatus.PREPARING, AttemptStatus.RUNNING)


class Change(NamedTuple):
    """A rollout and its latest attempt after an event. Unchanged: the same objects."""

    rollout: Rollout
    attempt: Attempt


def begin(rollout: Rollout, sequence_id: int, attempt_id: str, worker_id: str | None, now: float) -> Change:
    """An attempt starts: the rollout was claimed, or is started by hand."""
    attempt = Attempt(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=now,
        worker_id=worker_id,
    )
    return Change(replace(rollout, status=RolloutStatus.PREPARING, end_time=None), attempt)


def may_restart(rollout: Rollout) -> bool:
    """Whether an attempt may be started by hand: not after a success or a cancellation."""
    return rollout.status not in (RolloutStatus.SUCCEEDED, RolloutStatus.CANCELLED)


def superseded(attempt: Attempt, now: float) -> Attempt:
    """A newer attempt was started by hand, or the rollout was cancelled, while this one was running."""
    if attempt.status in ACTIVE:
        return replace(attempt, status=AttemptStatus.CANCELLED, end_time=now)
    return attempt


def heard(rollout: Rollout, attempt: Attempt, now: float, *, span: bool) -> Change:
    """A heartbeat or a span of the latest attempt arrived."""
    if not _is_alive(rollout, attempt):
        return Change(rollout, attempt)
    revived = attempt.status is AttemptStatus.UNRESPONSIVE
    running = span or revived or attempt.status is AttemptStatus.RUNNING
    attempt = replace(
        attempt,
        last_heartbeat_time=now,
        status=AttemptStatus.RUNNING if running else attempt.status,
    )
    if running and rollout.status is not RolloutStatus.RUNNING:
        rollout = replace(rollout, status=RolloutStatus.RUNNING)
    return Change(rollout, attempt)


def report(rollout: Rollout, attempt: Attempt, status: Literal["succeeded", "failed"], now: float) -> Change:
    """The runner says how the latest attempt ended."""
    if not _is_alive(rollout, attempt):
        return Change(rollout, attempt)
    attempt = replace(attempt, status=AttemptStatus(status), end_time=now)
    return Change(_after(rollout, attempt, now), attempt)


Overdue = Literal[AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE]


def overdue(config: RolloutConfig, attempt: Attempt, now: float, listening_since: float) -> Overdue | None:
    """Which limit an attempt has exceeded. Silence counts from `listening_since`, when the store opened."""
    if attempt.status not in ACTIVE:
        return None
    if config.timeout_seconds is not None and now - attempt.start_time >= config.timeout_seconds:
        return AttemptStatus.TIMEOUT
    if config.unresponsive_seconds is not None and now - _heard_at(attempt, listening_since) >= (
        config.unresponsive_seconds
    ):
        return AttemptStatus.UNRESPONSIVE
    return None


def deadline(config: RolloutConfig, attempt: Attempt, listening_since: float = 0.0) -> float | None:
    """When the attempt will be overdue without a sign of life."""
    if attempt.status not in ACTIVE:
        return None
    limits = []
    if config.timeout_seconds is not None:
        limits.append(attempt.start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        limits.append(_heard_at(attempt, listening_since) + config.unresponsive_seconds)
    return min(limits, default=None)


def expire(rollout: Rollout, attempt: Attempt, status: Overdue, now: float) -> Change:
    """The latest attempt is overdue. Silence is no end yet: the attempt goes on with its next sign of life."""
    attempt = replace(attempt, status=status, end_time=now if status is AttemptStatus.TIMEOUT else None)
    return Change(_after(rollout, attempt, now), attempt)


def cancel(rollout: Rollout, attempt: Attempt | None, now: float) -> tuple[Rollout, Attempt | None]:
    """The rollout is cancelled. If it has ended, it stays as it ended."""
    if rollout.status in FINAL:
        return rollout, attempt
    if attempt is not None:
        attempt = superseded(attempt, now)
    return replace(rollout, status=RolloutStatus.CANCELLED, end_time=now), attempt


def busy(worker: Worker, attempt: Attempt, now: float) -> Worker:
    """The worker got an attempt."""
    return replace(
        worker,
        status=WorkerStatus.BUSY,
        last_claim_time=now,
        last_busy_time=now,
        current_rollout_id=attempt.rollout_id,
        current_attempt_id=attempt.attempt_id,
    )


def idle(worker: Worker, now: float) -> Worker:
    """The worker found the queue empty, or its attempt is over."""
    return replace(
        worker, status=WorkerStatus.IDLE, last_idle_time=now, current_rollout_id=None, current_attempt_id=None
    )


def lost(worker: Worker) -> Worker:
    """Its attempt is overdue."""
    return replace(worker, status=WorkerStatus.UNKNOWN)


def _is_alive(rollout: Rollout, attempt: Attempt) -> bool:
    """Whether a report about the latest attempt still counts."""
    if rollout.status in FINAL:
        return False
    if attempt.status is AttemptStatus.UNRESPONSIVE:
        return rollout.status is RolloutStatus.REQUEUING
    return attempt.status in ACTIVE


def _after(rollout: Rollout, attempt: Attempt, now: float) -> Rollout:
    """Return the rollout after the end of its latest attempt."""
    if attempt.status is AttemptStatus.SUCCEEDED:
        return replace(rollout, status=RolloutStatus.SUCCEEDED, end_time=now)
    config = rollout.config
    if str(attempt.status) in config.retry_condition and attempt.sequence_id < config.max_attempts:
        return replace(rollout, status=RolloutStatus.REQUEUING)
    return replace(rollout, status=RolloutStatus.FAILED, end_time=now)


def _heard_at(attempt: Attempt, listening_since: float) -> float:
    heard_at = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
    return max(heard_at, listening_since)
