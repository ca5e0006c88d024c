"""`ending_of`: pure rules that turn what is known about an attempt into its status, reward and failure.

An *outcome* is the model's own doing (a reply cut off at its maximum length, a context overflow, too many steps,
abnormal output): the episode is kept, with the reward set in `ajet.failure_reward`. A *fault* teaches the model
nothing: `engine_error` and `judge_error` carry no reward. `workflow_error` and `timeout` lie in between:
`failure_reward` decides, and by default they are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ajet.schema.episode import EpisodeStatus, Failure, Outcome
from ajet.schema.errors import EngineError, EngineOverloadedError, GenerationTimeoutError
from ajet.task_runner.results import WorkflowResult

if TYPE_CHECKING:
    from ajet.config.sections import FailureRewardConfig, Treatment

ENGINE_CODES = frozenset({EngineError.code, EngineOverloadedError.code, GenerationTimeoutError.code})

ENDS_CALLS = (Outcome.ABNORMAL, Outcome.OVERFLOW, Outcome.MAX_STEPS)
"""Outcomes that refuse further model calls, most serious first. If the workflow raises after one of them, the error is
assumed to be its consequence."""

BY_GRAVITY = (*ENDS_CALLS, Outcome.LENGTH)


class Stop(StrEnum):
    """Why the runner stopped waiting for workflow and judge."""

    RETURNED = "returned"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class AttemptFacts:
    """What is known about an attempt once it is over."""

    stop: Stop
    result: WorkflowResult | None = None
    """None unless `stop` is RETURNED."""
    outcomes: frozenset[Outcome] = frozenset()
    engine_failure: EngineError | None = None
    """Why the last model call failed, if the engine was at fault."""
    where: str = ""
    """The user code's stack when the deadline passed."""
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """An attempt's status, reward and failure."""

    status: EpisodeStatus
    reward: float | list[float] | None = None
    failure: Failure | None = None
    is_success: bool | None = None
    retry: bool = False
    """The engine was at fault: the episode may be attempted again."""


def ending_of(facts: AttemptFacts, rules: FailureRewardConfig) -> Ending:
    """Apply the rules."""
    if facts.stop is Stop.CANCELLED:
        return Ending(EpisodeStatus.CANCELLED, failure=Failure("EpisodeCancelled", "the episode was stopped"))
    if facts.stop is Stop.DEADLINE:
        message = f"ajet.rollout.episode_timeout: the episode did not end within {facts.timeout_s:g} s"
        return Ending(EpisodeStatus.TIMEOUT, _number(rules.timeout), Failure("EpisodeTimeout", message, facts.where))
    assert facts.result is not None
    if facts.result.finished:
        return _finished(facts.result, facts.outcomes, rules)
    return _raised(facts, facts.result, rules)


def _finished(result: WorkflowResult, outcomes: frozenset[Outcome], rules: FailureRewardConfig) -> Ending:
    outcome = _gravest(outcomes)
    status = EpisodeStatus.COMPLETED if outcome is None else EpisodeStatus.TRUNCATED
    treatment = "judge" if outcome is None else _treatment_of(outcome, rules)
    if outcome is not None and treatment != "judge":
        reward = _number(treatment)
        failure = Failure(outcome, f"ajet.failure_reward.{_key_of(outcome)}: drop") if reward is None else None
        return Ending(status, reward, failure, is_success=False)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    return Ending(status, result.reward, is_success=result.is_success)


def _raised(facts: AttemptFacts, result: WorkflowResult, rules: FailureRewardConfig) -> Ending:
    outcome = _gravest(facts.outcomes & set(ENDS_CALLS))
    if outcome is not None:
        treatment = _treatment_of(outcome, rules)
        failure = result.failure
        if treatment == "judge" and failure is not None:
            hint = (
                f" [the workflow didn't catch the error of the model's {outcome}, so there is no output to judge; to "
                f"train such episodes, catch the error, or set ajet.failure_reward.{_key_of(outcome)} to a number]"
            )
            failure = replace(failure, message=failure.message + hint)
        return Ending(EpisodeStatus.TRUNCATED, _number(treatment), failure, is_success=False)
    if result.debugger_quit:
        return Ending(EpisodeStatus.CANCELLED, failure=result.failure)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    if result.failed_in == "isolation":
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    if facts.engine_failure is not None or result.model_error in ENGINE_CODES:
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    return Ending(EpisodeStatus.WORKFLOW_ERROR, _number(rules.workflow_error), result.failure)


def _key_of(outcome: Outcome) -> str:
    """The key of `ajet.failure_reward` that applies to an outcome."""
    return {Outcome.ABNORMAL: "abnormal", Outcome.OVERFLOW: "overflow"}.get(outcome, "truncated")


def _treatment_of(outcome: Outcome, rules: FailureRewardConfig) -> Treatment:
    """What `ajet.failure_reward` says about an outcome."""
    treatment: Treatment = getattr(rules, _key_of(outcome))
    return treatment


def _gravest(outcomes: frozenset[Outcome]) -> Outcome | None:
    return next((outcome for outcome in BY_GRAVITY if outcome in outcomes), None)


def _number(treatment: Treatment) -> float | None:
    return None if isinstance(treatment, str) else float(treatment)
