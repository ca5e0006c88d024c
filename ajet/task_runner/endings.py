"""`ending_of`: pure rules that turn what is known about an attempt into its status, reward and failure.

An *outcome* is the model's own doing (a reply cut off at its maximum length, a context overflow, too many steps,
abnormal output): the episode is kept, with the reward set in `ajet.failure_reward`, whether or not the workflow caught
the error. A *fault* teaches the model nothing: `engine_error`, `environment_error` and `judge_error` carry no reward.
`workflow_error` and `timeout` lie in between: `failure_reward` decides, and by default they are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ajet.schema.episode import Episode, EpisodeStatus, Failure, Outcome
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
    otherwise: float | None = None
    """The reward if the workflow gave none by `tuner.reward` either."""
    masked: bool = False
    """The episode counts with its reward, but none of its tokens is trained."""
    later: bool = False
    """The judge decides later: the reward only stands in for one."""


def ending_of(facts: AttemptFacts, rules: FailureRewardConfig) -> Ending:
    """Apply the rules."""
    if facts.stop is Stop.CANCELLED:
        return Ending(EpisodeStatus.CANCELLED, failure=Failure("EpisodeCancelled", "the episode was stopped"))
    if facts.stop is Stop.DEADLINE:
        message = f"ajet.rollout.episode_timeout: the episode did not end within {facts.timeout_s:g} s"
        return _failed(EpisodeStatus.TIMEOUT, rules.timeout, Failure("EpisodeTimeout", message, facts.where), rules)
    assert facts.result is not None
    if facts.result.finished:
        return _finished(facts.result, facts.outcomes, rules)
    return _raised(facts, facts.result, rules)


def judged_early(outcomes: frozenset[Outcome], rules: FailureRewardConfig, *, cut: bool = False) -> Outcome | None:
    """The outcome that ended a workflow by an error, if the judge is to be asked about it all the same.

    `cut`: the error says that a reply was cut off.
    """
    outcome = _ended_by(outcomes, cut=cut)
    return outcome if outcome is not None and _treatment_of(outcome, rules) in ("judge", "mask") else None


def dropped_by(episode: Episode) -> str | None:
    """The key of `ajet.failure_reward` that dropped this episode."""
    if episode.usable:
        return None
    if episode.status in (EpisodeStatus.WORKFLOW_ERROR, EpisodeStatus.TIMEOUT):
        return str(episode.status)
    outcome = _gravest(frozenset(episode.outcomes)) if episode.status is EpisodeStatus.TRUNCATED else None
    return None if outcome is None else _key_of(outcome)


def _finished(result: WorkflowResult, outcomes: frozenset[Outcome], rules: FailureRewardConfig) -> Ending:
    outcome = _gravest(outcomes)
    treatment = "judge" if outcome is None else _treatment_of(outcome, rules)
    if treatment not in ("judge", "mask"):
        assert outcome is not None
        dropped = Failure(outcome, f"ajet.failure_reward.{_key_of(outcome)}: drop") if treatment == "drop" else None
        return _failed(EpisodeStatus.TRUNCATED, treatment, dropped, rules)
    if result.failed_in == "judge" and result.environment_error:
        return _environment_failed(result, rules)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    if outcome is None:
        later = result.later is not None
        return Ending(EpisodeStatus.COMPLETED, result.reward, is_success=result.is_success, later=later)
    return Ending(
        EpisodeStatus.TRUNCATED,
        result.reward,
        is_success=result.is_success,
        otherwise=rules.otherwise,
        masked=treatment == "mask",
        later=result.later is not None,
    )


def _raised(facts: AttemptFacts, result: WorkflowResult, rules: FailureRewardConfig) -> Ending:
    if result.debugger_quit:
        return Ending(EpisodeStatus.CANCELLED, failure=result.failure)
    outcome = _ended_by(facts.outcomes, cut=result.cut_reply)
    if outcome is not None:
        ending = _failed(EpisodeStatus.TRUNCATED, _treatment_of(outcome, rules), result.failure, rules)
        if ending.otherwise is None or result.reward is None:
            return ending
        later = result.later is not None
        return replace(ending, reward=result.reward, is_success=result.is_success, later=later)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    if result.failed_in == "isolation":
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    if facts.engine_failure is not None or result.model_error in ENGINE_CODES:
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    if result.environment_error:
        return _environment_failed(result, rules)
    return _failed(EpisodeStatus.WORKFLOW_ERROR, rules.workflow_error, result.failure, rules)


def _environment_failed(result: WorkflowResult, rules: FailureRewardConfig) -> Ending:
    """Unavailable: run the episode again. Anything else may be the answer to an action of the model."""
    if result.environment_error == "unavailable":
        return Ending(EpisodeStatus.ENVIRONMENT_ERROR, failure=result.failure, retry=True)
    return _failed(EpisodeStatus.WORKFLOW_ERROR, rules.workflow_error, result.failure, rules)


def _failed(status: EpisodeStatus, treatment: Treatment, failure: Failure | None, rules: FailureRewardConfig) -> Ending:
    """The ending of an episode without output, before a judge's reward."""
    if treatment == "drop":
        return Ending(status, failure=failure, is_success=False)
    if isinstance(treatment, str):
        return Ending(status, failure=failure, is_success=False, otherwise=rules.otherwise, masked=treatment == "mask")
    return Ending(status, float(treatment), failure, is_success=False)


def _ended_by(outcomes: frozenset[Outcome], *, cut: bool) -> Outcome | None:
    """The outcome to which a workflow's error is put down."""
    return _gravest(outcomes & {*ENDS_CALLS, *([Outcome.LENGTH] if cut else [])})


def _key_of(outcome: Outcome) -> str:
    """The key of `ajet.failure_reward` that applies to an outcome."""
    return {Outcome.ABNORMAL: "abnormal", Outcome.OVERFLOW: "overflow"}.get(outcome, "truncated")


def _treatment_of(outcome: Outcome, rules: FailureRewardConfig) -> Treatment:
    """What `ajet.failure_reward` says about an outcome."""
    treatment: Treatment = getattr(rules, _key_of(outcome))
    return treatment


def _gravest(outcomes: frozenset[Outcome]) -> Outcome | None:
    return next((outcome for outcome in BY_GRAVITY if outcome in outcomes), None)
