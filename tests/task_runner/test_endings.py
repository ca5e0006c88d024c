"""The rules by which an episode's end becomes a status and a reward."""

from __future__ import annotations

import pytest

from ajet.config.root import FailureRewardConfig
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger, Outcome
from ajet.schema.errors import EngineError
from ajet.task_runner.attempt import WorkflowResult
from ajet.task_runner.endings import (
    AttemptFacts,
    Ending,
    Stop,
    dropped_by,
    ending_of,
    judged_early,
    without_reward,
)

DEFAULTS = FailureRewardConfig()
RETURNED = WorkflowResult(finished=True, reward=0.5, is_success=True)


def raised(**more: object) -> WorkflowResult:
    return WorkflowResult(failure=Failure("KeyError", "'x'"), failed_in="workflow", **more)  # type: ignore[arg-type]


def end(result: WorkflowResult, *outcomes: Outcome, rules: FailureRewardConfig = DEFAULTS, **more: object) -> Ending:
    return ending_of(AttemptFacts(Stop.RETURNED, result, frozenset(outcomes), **more), rules)  # type: ignore[arg-type]


def test_an_output_is_completed() -> None:
    assert end(RETURNED) == Ending(EpisodeStatus.COMPLETED, 0.5, None, True)


@pytest.mark.parametrize(
    ("outcomes", "rules", "reward"),
    [
        ([Outcome.LENGTH], {}, 0.5),
        ([Outcome.MAX_STEPS], {}, 0.5),
        ([Outcome.OVERFLOW], {}, 0.5),
        ([Outcome.ABNORMAL], {}, -1.0),
        ([Outcome.LENGTH, Outcome.ABNORMAL], {}, -1.0),
        ([Outcome.LENGTH], {"truncated": -0.5}, -0.5),
        ([Outcome.LENGTH], {"truncated": "drop"}, None),
        ([Outcome.LENGTH, Outcome.OVERFLOW], {"truncated": "drop", "overflow": 0}, 0.0),
        ([Outcome.ABNORMAL], {"abnormal": "judge"}, 0.5),
    ],
)
def test_outcomes_are_kept_with_the_configured_reward(outcomes, rules, reward) -> None:
    ending = end(RETURNED, *outcomes, rules=FailureRewardConfig(**rules))
    assert (ending.status, ending.reward) == (EpisodeStatus.TRUNCATED, reward)
    assert (ending.failure is None) == (reward is not None)


def test_a_configured_reward_outweighs_a_judge_that_failed() -> None:
    result = WorkflowResult(finished=True, failed_in="judge", failure=Failure("JudgeFault", "None"))
    assert end(result).status is EpisodeStatus.JUDGE_ERROR
    assert end(result, Outcome.LENGTH).status is EpisodeStatus.JUDGE_ERROR
    assert end(result, Outcome.ABNORMAL) == Ending(EpisodeStatus.TRUNCATED, -1.0, None, False, by_rule=True)


@pytest.mark.parametrize(
    ("outcome", "rules", "reward", "open_by"),
    [
        (Outcome.LENGTH, {}, None, "truncated"),
        (Outcome.OVERFLOW, {}, None, "overflow"),
        (Outcome.MAX_STEPS, {"truncated": "mask"}, None, "truncated"),
        (Outcome.OVERFLOW, {"overflow": -1}, -1.0, ""),
        (Outcome.MAX_STEPS, {"truncated": 0.25}, 0.25, ""),
        (Outcome.MAX_STEPS, {"truncated": "drop"}, None, ""),
        (Outcome.ABNORMAL, {}, -1.0, ""),
    ],
)
def test_an_outcome_that_the_workflow_lets_through(outcome, rules, reward, open_by) -> None:
    ending = end(raised(), outcome, rules=FailureRewardConfig(**rules))
    assert (ending.status, ending.reward, ending.retry) == (EpisodeStatus.TRUNCATED, reward, False)
    assert (ending.open_by, ending.is_success) == (open_by, False)
    assert ending.failure is not None and ending.failure.message.startswith("'x'")


def test_the_judges_word_on_an_outcome_that_the_workflow_let_through() -> None:
    ending = end(raised(reward=0.25, is_success=False), Outcome.MAX_STEPS)
    assert (ending.status, ending.reward, ending.masked) == (EpisodeStatus.TRUNCATED, 0.25, False)
    asked = {outcome: judged_early(frozenset({outcome}), DEFAULTS) for outcome in Outcome}
    assert asked == {
        Outcome.LENGTH: Outcome.LENGTH,
        Outcome.OVERFLOW: Outcome.OVERFLOW,
        Outcome.MAX_STEPS: Outcome.MAX_STEPS,
        Outcome.ABNORMAL: None,  # a number needs no judge
    }
    assert judged_early(frozenset({Outcome.LENGTH}), DEFAULTS, explained=True) is None
    assert judged_early(frozenset({Outcome.OVERFLOW}), DEFAULTS, explained=True) is Outcome.OVERFLOW


def test_an_error_that_something_else_explains_is_not_put_down_to_a_cut_reply() -> None:
    assert end(raised(), Outcome.LENGTH).status is EpisodeStatus.TRUNCATED
    assert end(raised()).status is EpisodeStatus.WORKFLOW_ERROR
    invalid = WorkflowResult(failure=Failure("RewardError", "nan"), failed_in="output")
    lost = raised(environment_error="unavailable")
    assert end(raised(model_error="engine_error"), Outcome.LENGTH).status is EpisodeStatus.ENGINE_ERROR
    assert end(raised(), Outcome.LENGTH, engine_failure=EngineError("gone")).status is EpisodeStatus.ENGINE_ERROR
    assert end(lost, Outcome.LENGTH).status is EpisodeStatus.ENVIRONMENT_ERROR
    for outcome in (Outcome.LENGTH, Outcome.OVERFLOW):
        assert end(invalid, outcome).status is EpisodeStatus.WORKFLOW_ERROR


def test_masked_episodes_keep_their_reward() -> None:
    rules = FailureRewardConfig(truncated="mask", workflow_error="mask", otherwise=-0.5)
    cut = end(RETURNED, Outcome.LENGTH, rules=rules)
    assert (cut.reward, cut.masked) == (0.5, True)
    failed = end(raised(), rules=rules)
    assert (failed.status, failed.reward, failed.open_by) == (EpisodeStatus.WORKFLOW_ERROR, None, "workflow_error")
    assert failed.masked
    late = ending_of(AttemptFacts(Stop.DEADLINE, timeout_s=5), FailureRewardConfig(timeout="mask"))
    assert (late.status, late.reward, late.open_by) == (EpisodeStatus.TIMEOUT, None, "timeout")
    told = without_reward(late)
    assert told.failure is not None and "no reward: see ajet.failure_reward.timeout" in told.failure.message
    assert not end(RETURNED, rules=rules).masked


def test_a_note_leaves_the_key_that_the_failure_names() -> None:
    key = "ajet.rollout.multi_turn.max_steps"
    said = f"Error code: 400 - agent 'default_agent' has used up its 30 model calls ({key}): end the episode here"
    failed = WorkflowResult(failure=Failure("BadRequestError", said), failed_in="workflow")
    told = without_reward(end(failed, Outcome.MAX_STEPS))
    assert told.failure is not None and f"({key})" in told.failure.in_short and "(no reward: " in told.failure.in_short


def test_which_key_dropped_an_episode() -> None:
    def ended(status: EpisodeStatus, *outcomes: Outcome, reward: float | None = None) -> str | None:
        return dropped_by(Episode("e", "t", status, CallTree(), Ledger(), reward=reward, outcomes=outcomes))

    assert ended(EpisodeStatus.WORKFLOW_ERROR) == "workflow_error"
    assert ended(EpisodeStatus.TIMEOUT) == "timeout"
    assert ended(EpisodeStatus.TRUNCATED, Outcome.LENGTH) == "truncated"
    assert ended(EpisodeStatus.TRUNCATED, Outcome.LENGTH, Outcome.OVERFLOW) == "overflow"
    assert ended(EpisodeStatus.WORKFLOW_ERROR, reward=0.0) is None
    assert ended(EpisodeStatus.JUDGE_ERROR) is ended(EpisodeStatus.ENGINE_ERROR) is None


def test_workflow_error_and_timeout_are_dropped_or_rewarded() -> None:
    assert end(raised()).reward is None
    assert end(raised(), rules=FailureRewardConfig(workflow_error=-2)).reward == -2.0
    late = ending_of(AttemptFacts(Stop.DEADLINE, where="line 3", timeout_s=5), FailureRewardConfig(timeout=-3))
    assert (late.status, late.reward) == (EpisodeStatus.TIMEOUT, -3.0)
    assert late.failure == Failure(
        "EpisodeTimeout", "ajet.rollout.episode_timeout: the episode did not end within 5 s", "line 3"
    )


@pytest.mark.parametrize("code", ["engine_error", "overloaded", "timeout"])
def test_the_engines_faults_are_retried(code: str) -> None:
    ending = end(raised(model_error=code))
    assert (ending.status, ending.reward, ending.retry) == (EpisodeStatus.ENGINE_ERROR, None, True)
    assert end(raised(), engine_failure=EngineError("gone")).retry


def test_a_request_that_was_wrong_is_the_workflows_error() -> None:
    assert end(raised(model_error="invalid_request")).status is EpisodeStatus.WORKFLOW_ERROR


@pytest.mark.parametrize("outcomes", [[], [Outcome.LENGTH]])
def test_what_a_workflow_returned_after_a_call_that_the_engine_failed_is_no_reward(outcomes: list[Outcome]) -> None:
    ending = end(RETURNED, *outcomes, engine_failure=EngineError("gone"))
    assert (ending.status, ending.reward, ending.retry) == (EpisodeStatus.ENGINE_ERROR, None, True)
    assert ending.failure is not None
    assert ending.failure.in_short.startswith("EngineError: gone (")


def test_a_limit_reached_after_the_engine_failed_is_the_models_doing() -> None:
    ending = end(RETURNED, Outcome.OVERFLOW, engine_failure=EngineError("gone"))
    assert (ending.status, ending.reward) == (EpisodeStatus.TRUNCATED, 0.5)


def test_stopped_episodes_and_quit_debuggers_are_cancelled() -> None:
    assert ending_of(AttemptFacts(Stop.CANCELLED), DEFAULTS).status is EpisodeStatus.CANCELLED
    assert end(raised(debugger_quit=True)).status is EpisodeStatus.CANCELLED
