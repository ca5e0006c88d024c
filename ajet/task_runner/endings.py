"""`ending_of`: pure rules that turn what is known about an attempt into its status, reward and failure.

An *outcome* is the model's own doing (a reply cut off at its maximum length, a context overflow, too many steps,
abnormal output): `ajet.failure_reward` says what the episode gets, whether or not the workflow caught the error. A
*fault* teaches the model nothing: `engine_error`, `environment_error` and `judge_error` carry no reward.
`workflow_error` and `timeout` lie in between: `failure_reward` decides, and by default they are dropped. A reward that
nobody gave is never 0: `without_reward` says why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ajet.schema.episode import Episode, EpisodeStatus, Failure, Outcome
from ajet.schema.errors import EngineError
from ajet.task_runner.results import WorkflowResult

if TYPE_CHECKING:
    from ajet.config.sections import FailureRewardConfig, Treatment

EXAMPLE_JUDGE = "ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"
NO_REWARD = (
    "the workflow returned reward=None and there is no judge: return WorkflowOutput(reward=…), "
    f"or set ajet.task_judge.judge_protocol, for example to {EXAMPLE_JUDGE}"
)

MOST_BEFORE_NOTE = 100
"""Characters of a message's first line before a note: a line of the log shows about 300."""
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
    open_by: str = ""
    """The key of `ajet.failure_reward` by which an episode without output gets what judge or `tuner.reward` gave, else
    `otherwise`."""
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
        return _failed(EpisodeStatus.TIMEOUT, "timeout", Failure("EpisodeTimeout", message, facts.where), rules)
    assert facts.result is not None
    if facts.result.finished:
        return _finished(facts.result, facts.outcomes, rules)
    return _raised(facts, facts.result, rules)


def judged_early(
    outcomes: frozenset[Outcome], rules: FailureRewardConfig, *, explained: bool = False
) -> Outcome | None:
    """The outcome that ended a workflow by an error, if the judge is to be asked about it all the same.

    `explained`: see `WorkflowResult.explained`.
    """
    outcome = _ended_by(outcomes, explained=explained)
    return outcome if outcome is not None and _treatment_of(outcome, rules) in ("judge", "mask") else None


def dropped_by(episode: Episode) -> str | None:
    """The key of `ajet.failure_reward` that dropped this episode."""
    if episode.usable:
        return None
    if episode.status in (EpisodeStatus.WORKFLOW_ERROR, EpisodeStatus.TIMEOUT):
        return str(episode.status)
    outcome = _gravest(frozenset(episode.outcomes)) if episode.status is EpisodeStatus.TRUNCATED else None
    return None if outcome is None else _key_of(outcome)


def without_reward(ending: Ending) -> Ending:
    """The ending of an episode that nobody gave a reward: it is dropped, and its failure says what to change."""
    if ending.failure is None:
        return replace(ending, status=EpisodeStatus.WORKFLOW_ERROR, failure=Failure("RewardError", NO_REWARD))
    if not ending.open_by:
        return ending
    why = f"no reward: to train it, set ajet.failure_reward.{ending.open_by} to a number"
    return replace(ending, failure=_noted(ending.failure, why))


def _finished(result: WorkflowResult, outcomes: frozenset[Outcome], rules: FailureRewardConfig) -> Ending:
    outcome = _gravest(outcomes)
    treatment = "judge" if outcome is None else _treatment_of(outcome, rules)
    if treatment not in ("judge", "mask"):
        assert outcome is not None
        dropped = Failure(outcome, f"ajet.failure_reward.{_key_of(outcome)}: drop") if treatment == "drop" else None
        return _failed(EpisodeStatus.TRUNCATED, _key_of(outcome), dropped, rules)
    if result.failed_in == "judge" and result.environment_error:
        return _environment_failed(result, rules)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    return Ending(
        EpisodeStatus.COMPLETED if outcome is None else EpisodeStatus.TRUNCATED,
        result.reward,
        is_success=result.is_success,
        masked=treatment == "mask",
        later=result.later is not None,
    )


def _raised(facts: AttemptFacts, result: WorkflowResult, rules: FailureRewardConfig) -> Ending:
    if result.debugger_quit:
        return Ending(EpisodeStatus.CANCELLED, failure=result.failure)
    if result.failed_in == "output":
        return _failed(EpisodeStatus.WORKFLOW_ERROR, "workflow_error", result.failure, rules)
    outcome = _ended_by(facts.outcomes, explained=result.explained or facts.engine_failure is not None)
    if outcome is not None:
        failure = result.failure
        if outcome is Outcome.LENGTH and failure is not None:
            failure = _noted(failure, "after a reply that was cut at its maximum length")
        ending = _failed(EpisodeStatus.TRUNCATED, _key_of(outcome), failure, rules)
        if not ending.open_by or result.reward is None:
            return ending
        later = result.later is not None
        return replace(ending, reward=result.reward, is_success=result.is_success, later=later)
    if result.failed_in == "judge":
        return Ending(EpisodeStatus.JUDGE_ERROR, failure=result.failure)
    if result.failed_in == "isolation":
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    if facts.engine_failure is not None or result.engine_error:
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=result.failure, retry=True)
    if result.environment_error:
        return _environment_failed(result, rules)
    return _failed(EpisodeStatus.WORKFLOW_ERROR, "workflow_error", result.failure, rules)


def _environment_failed(result: WorkflowResult, rules: FailureRewardConfig) -> Ending:
    """Unavailable: run the episode again. Anything else may be the answer to an action of the model."""
    if result.environment_error == "unavailable":
        return Ending(EpisodeStatus.ENVIRONMENT_ERROR, failure=result.failure, retry=True)
    return _failed(EpisodeStatus.WORKFLOW_ERROR, "workflow_error", result.failure, rules)


def _failed(status: EpisodeStatus, key: str, failure: Failure | None, rules: FailureRewardConfig) -> Ending:
    """The ending of an episode without output, before a judge's reward. `key`: of `ajet.failure_reward`."""
    treatment: Treatment = getattr(rules, key)
    if treatment == "drop":
        return Ending(status, failure=failure, is_success=False)
    if isinstance(treatment, str):
        return Ending(status, failure=failure, is_success=False, open_by=key, masked=treatment == "mask")
    return Ending(status, float(treatment), failure, is_success=False)


def _ended_by(outcomes: frozenset[Outcome], *, explained: bool) -> Outcome | None:
    """The outcome to which a workflow's error is put down. Clients raise errors of many names on a cut reply, so any
    error after one is put down to it, unless something else explains it."""
    return _gravest(outcomes - {Outcome.LENGTH} if explained else outcomes)


def _noted(failure: Failure, note: str) -> Failure:
    """The failure with a note in its first line, which is what the log shows. A long one is repeated below."""
    first, newline, rest = failure.message.partition("\n")
    if len(first) > MOST_BEFORE_NOTE:
        return replace(failure, message=f"{first[:MOST_BEFORE_NOTE]}… ({note})\n{failure.message}")
    return replace(failure, message=f"{first} ({note}){newline}{rest}")


def _key_of(outcome: Outcome) -> str:
    """The key of `ajet.failure_reward` that applies to an outcome."""
    return {Outcome.ABNORMAL: "abnormal", Outcome.OVERFLOW: "overflow"}.get(outcome, "truncated")


def _treatment_of(outcome: Outcome, rules: FailureRewardConfig) -> Treatment:
    """What `ajet.failure_reward` says about an outcome."""
    treatment: Treatment = getattr(rules, _key_of(outcome))
    return treatment


def _gravest(outcomes: frozenset[Outcome]) -> Outcome | None:
    return next((outcome for outcome in BY_GRAVITY if outcome in outcomes), None)
