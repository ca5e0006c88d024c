"""The state machine, event by event, and random sequences of events that must never break its rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ajet.store import states
from ajet.store.records import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, Worker, WorkerStatus

RETRIES = RolloutConfig(max_attempts=3, retry_condition=("failed", "timeout", "unresponsive"), timeout_seconds=100)


def begun(config: RolloutConfig = RETRIES, sequence: int = 1) -> states.Change:
    rollout = Rollout(rollout_id="r", input=None, start_time=0.0, config=config)
    return states.begin(rollout, sequence, f"a{sequence}", "w", 10.0)


def test_a_claimed_rollout_is_preparing_and_runs_with_its_first_span() -> None:
    change = begun()
    assert (change.rollout.status, change.attempt.status) == ("preparing", "preparing")
    beat = states.heard(*change, 11.0, span=False)
    assert (beat.rollout.status, beat.attempt.status, beat.attempt.last_heartbeat_time) == (
        "preparing",
        "preparing",
        11,
    )
    span = states.heard(*beat, 12.0, span=True)
    assert (span.rollout.status, span.attempt.status) == ("running", "running")


def test_success_is_final() -> None:
    done = states.report(*begun(), "succeeded", 20.0)
    assert (done.rollout.status, done.rollout.end_time, done.attempt.end_time) == ("succeeded", 20, 20)
    assert states.report(*done, "failed", 21.0) == done
    assert states.heard(*done, 21.0, span=True) == done
    assert states.cancel(*done, 21.0) == tuple(done)
    assert not states.may_restart(done.rollout)


def test_a_failure_is_attempted_again_only_if_the_config_says_so() -> None:
    assert states.report(*begun(), "failed", 20.0).rollout.status == "requeuing"
    assert states.report(*begun(sequence=3), "failed", 20.0).rollout.status == "failed"
    only_timeouts = RolloutConfig(max_attempts=3, retry_condition=("timeout",))
    assert states.report(*begun(only_timeouts), "failed", 20.0).rollout.status == "failed"


def test_deadlines_are_of_the_whole_attempt_and_of_its_silence() -> None:
    config = RolloutConfig(timeout_seconds=100, unresponsive_seconds=10)
    _, attempt = begun(config)
    assert states.deadline(config, attempt) == 20
    assert states.overdue(config, attempt, 19.9, 0) is None
    assert states.overdue(config, attempt, 20, 0) is AttemptStatus.UNRESPONSIVE
    assert states.overdue(config, attempt, 20, listening_since=15) is None, "nobody could be heard before"
    assert states.deadline(config, attempt, listening_since=15) == 25
    assert states.overdue(config, attempt, 110, listening_since=109) is AttemptStatus.TIMEOUT
    assert states.deadline(RolloutConfig(), attempt) is None


def test_an_unresponsive_attempt_goes_on_if_it_is_heard_of_before_another_begins() -> None:
    silent = states.expire(*begun(), AttemptStatus.UNRESPONSIVE, 50.0)
    assert silent.rollout.status == "requeuing"
    revived = states.heard(*silent, 51.0, span=False)
    assert (revived.rollout.status, revived.attempt.status) == ("running", "running")
    assert states.report(*silent, "succeeded", 51.0).rollout.status == "succeeded"
    given_up = states.expire(*begun(RolloutConfig()), AttemptStatus.UNRESPONSIVE, 50.0)
    assert states.heard(*given_up, 51.0, span=True) == given_up


def test_a_timeout_is_for_good() -> None:
    late = states.expire(*begun(), AttemptStatus.TIMEOUT, 200.0)
    assert late.rollout.status == "requeuing"
    assert states.heard(*late, 201.0, span=True) == late
    assert states.report(*late, "succeeded", 201.0) == late


def test_cancelled_stays_cancelled() -> None:
    rollout, attempt = states.cancel(*begun(), 20.0)
    assert attempt is not None
    assert (rollout.status, attempt.status) == ("cancelled", "cancelled")
    assert states.report(rollout, attempt, "succeeded", 21.0) == (rollout, attempt)
    assert not states.may_restart(rollout)


def test_workers_are_busy_idle_or_unknown() -> None:
    worker = states.busy(Worker(worker_id="w"), begun().attempt, 10.0)
    assert (worker.status, worker.current_attempt_id) == (WorkerStatus.BUSY, "a1")
    assert states.lost(worker).status is WorkerStatus.UNKNOWN
    assert states.idle(worker, 20.0).current_attempt_id is None


@given(
    st.lists(st.sampled_from(["claim", "span", "beat", "ok", "bad", "timeout", "silent", "cancel", "old"]), max_size=40)
)
def test_no_sequence_of_events_breaks_the_rules(events: list[str]) -> None:
    rollout = Rollout(rollout_id="r", input=None, start_time=0.0, config=RETRIES)
    attempt: Attempt | None = None
    begun_attempts = 0
    for now, event in enumerate(events, 1):
        before = rollout
        if event == "claim" and rollout.status in states.QUEUED:
            begun_attempts += 1
            rollout, attempt = states.begin(rollout, begun_attempts, f"a{begun_attempts}", "w", now)
        elif event == "cancel":
            rollout, attempt = states.cancel(rollout, attempt, now)
        elif attempt is not None and event in ("span", "beat"):
            rollout, attempt = states.heard(rollout, attempt, now, span=event == "span")
        elif attempt is not None and event in ("ok", "bad"):
            rollout, attempt = states.report(rollout, attempt, "succeeded" if event == "ok" else "failed", now)
        elif attempt is not None and event in ("timeout", "silent") and attempt.status in states.ACTIVE:
            status = AttemptStatus.TIMEOUT if event == "timeout" else AttemptStatus.UNRESPONSIVE
            rollout, attempt = states.expire(rollout, attempt, status, now)
        if before.status in states.FINAL:
            assert rollout == before
        assert (rollout.end_time is not None) == (rollout.status in states.FINAL)
        assert begun_attempts <= RETRIES.max_attempts
        if rollout.status is RolloutStatus.SUCCEEDED:
            assert attempt is not None
            assert attempt.status is AttemptStatus.SUCCEEDED
