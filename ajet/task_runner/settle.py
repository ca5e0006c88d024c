"""How an episode ended and what it is worth: pure rules over what is known when its code has come back, or did not.

An *outcome* is the model's own doing (a reply cut by its length, an overflown context, too many steps, abnormal
output): it is kept, with the reward that `ajet.failure_reward` says. A *fault* teaches nothing: `engine_error` and
`judge_error` carry no reward. `workflow_error` and `timeout` lie between: `failure_reward` decides; by default they are
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ajet.schema.episode import EpisodeStatus, Failure, Outcome
from ajet.schema.errors import EngineError, EngineOverloadedError, GenerationTimeoutError
from ajet.task_runner.verdict import Verdict

if TYPE_CHECKING:
    from ajet.config.sections import FailureRewardConfig, Treatment

ENGINE_CODES = frozenset({EngineError.code, EngineOverloadedError.code, GenerationTimeoutError.code})

ENDS_CALLS = (Outcome.ABNORMAL, Outcome.OVERFLOW, Outcome.MAX_STEPS)
"""Outcomes that refuse further model calls, the gravest first: an error in the workflow after one is taken for its
consequence."""

BY_GRAVITY = (*ENDS_CALLS, Outcome.LENGTH)


class End(StrEnum):
    """Why the runner stopped waiting for the workflow and judge."""

    RETURNED = "returned"
    DEADLINE = "deadline"
    STOPPED = "stopped"


@dataclass(slots=True)
class Facts:
    """What is known about an attempt when it is over."""

    end: End
    verdict: Verdict | None = None
    """None unless `end` is RETURNED."""
    outcomes: frozenset[Outcome] = frozenset()
    engine_failure: EngineError | None = None
    """The last model call failed, through the engine's fault."""
    where: str = ""
    """For a deadline: where the code was."""
    timeout_s: float = 0.0


@dataclass(slots=True)
class Settlement:
    """An attempt's status, reward and failure."""

    status: EpisodeStatus
    reward: float | list[float] | None = None
    failure: Failure | None = None
    is_success: bool | None = None
    retry: bool = field(default=False)
    """A fault of the engine: the whole episode may be run again."""


def settle(facts: Facts, rules: FailureRewardConfig) -> Settlement:
    """Apply the rules."""
    if facts.end is End.STOPPED:
        return Settlement(EpisodeStatus.CANCELLED, failure=Failure("EpisodeCancelled", "the episode was stopped"))
    if facts.end is End.DEADLINE:
        message = f"ajet.rollout.episode_timeout: no end within {facts.timeout_s:g} s"
        failure = Failure("EpisodeTimeout", message, facts.where)
        return Settlement(EpisodeStatus.TIMEOUT, _number(rules.timeout), failure)
    assert facts.verdict is not None
    if facts.verdict.finished:
        return _finished(facts.verdict, facts.outcomes, rules)
    return _raised(facts, facts.verdict, rules)


def _finished(verdict: Verdict, outcomes: frozenset[Outcome], rules: FailureRewardConfig) -> Settlement:
    outcome = _gravest(outcomes)
    status = EpisodeStatus.COMPLETED if outcome is None else EpisodeStatus.TRUNCATED
    treatment = "judge" if outcome is None else treatment_of(outcome, rules)
    if outcome is not None and treatment != "judge":
        reward = _number(treatment)
        failure = Failure(outcome, f"ajet.failure_reward.{key_of(outcome)}: drop") if reward is None else None
        return Settlement(status, reward, failure, is_success=False)
    if verdict.failed_in == "judge":
        return Settlement(EpisodeStatus.JUDGE_ERROR, failure=verdict.failure)
    return Settlement(status, verdict.reward, is_success=verdict.is_success)


def _raised(facts: Facts, verdict: Verdict, rules: FailureRewardConfig) -> Settlement:
    outcome = _gravest(facts.outcomes & set(ENDS_CALLS))
    if outcome is not None:
        treatment = treatment_of(outcome, rules)
        failure = verdict.failure
        if treatment == "judge" and failure is not None:
            failure.message += (
                f" [the workflow let the model's {outcome} through, so there is no output to judge; to train such "
                f"episodes, catch the error, or set ajet.failure_reward.{key_of(outcome)} to a number]"
            )
        return Settlement(EpisodeStatus.TRUNCATED, _number(treatment), failure, is_success=False)
    if verdict.debugger_quit:
        return Settlement(EpisodeStatus.CANCELLED, failure=verdict.failure)
    if verdict.failed_in == "judge":
        return Settlement(EpisodeStatus.JUDGE_ERROR, failure=verdict.failure)
    if verdict.failed_in == "isolation":
        return Settlement(EpisodeStatus.ENGINE_ERROR, failure=verdict.failure, retry=True)
    if facts.engine_failure is not None or verdict.model_error in ENGINE_CODES:
        return Settlement(EpisodeStatus.ENGINE_ERROR, failure=verdict.failure, retry=True)
    return Settlement(EpisodeStatus.WORKFLOW_ERROR, _number(rules.workflow_error), verdict.failure)


def key_of(outcome: Outcome) -> str:
    """Which key of `ajet.failure_reward` decides about an outcome."""
    return {Outcome.ABNORMAL: "abnormal", Outcome.OVERFLOW: "overflow"}.get(outcome, "truncated")


def treatment_of(outcome: Outcome, rules: FailureRewardConfig) -> Treatment:
    """What `ajet.failure_reward` says about an outcome."""
    treatment: Treatment = getattr(rules, key_of(outcome))
    return treatment


def _gravest(outcomes: frozenset[Outcome]) -> Outcome | None:
    return next((outcome for outcome in BY_GRAVITY if outcome in outcomes), None)


def _number(treatment: Treatment) -> float | None:
    return None if isinstance(treatment, str) else float(treatment)
