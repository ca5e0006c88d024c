"""`ending_of`: from what is known about an attempt to its status, reward and failure; `LateJudge`: rewards that come
later.

An *outcome* is the model's own doing (a reply cut off at its maximum length, a context overflow, too many steps,
abnormal output): `ajet.failure_reward` says what the episode gets, whether or not the workflow caught the error. A
*fault* teaches the model nothing: `engine_error`, `environment_error` and `judge_error` carry no reward.
`workflow_error` and `timeout` lie in between: `failure_reward` decides, and by default they are dropped. A reward that
nobody gave is never 0: `without_reward` says why there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ajet.context_tracker.samples import untrain
from ajet.schema.episode import ROOT, Episode, EpisodeStatus, Failure, Outcome
from ajet.schema.errors import ConfigError, EngineError
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import (
    BaseJudge,
    GroupJudge,
    JudgedCall,
    JudgedEpisode,
    Judgement,
    Later,
    validate_rewards,
)
from ajet.task_runner.attempt import AttemptHandle, EarlyEnding, WorkflowResult
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.results import asked_again, called, describe, judge_result
from ajet.task_runner.thread_control import WorkflowInterrupted
from ajet.task_runner.threads import EpisodeThreads

if TYPE_CHECKING:
    from ajet.config.rollout import RolloutSection
    from ajet.config.root import FailureRewardConfig, Treatment

EXAMPLE_JUDGE = "ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"
NO_REWARD = (
    "the workflow returned reward=None and there is no judge: return WorkflowOutput(reward=…), "
    "end the episode of a service with a reward, "
    f"or set ajet.task_judge.judge_protocol, for example to {EXAMPLE_JUDGE}"
)

MOST_BEFORE_NOTE = 160
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
    by_rule: bool = False
    """`ajet.failure_reward` has a number, which is the reward: what calls and agents were given doesn't count."""


def ending_of(facts: AttemptFacts, rules: FailureRewardConfig) -> Ending:
    if facts.stop is Stop.CANCELLED:
        return Ending(EpisodeStatus.CANCELLED, failure=Failure("EpisodeCancelled", "the episode was stopped"))
    if facts.stop is Stop.DEADLINE:
        message = f"ajet.rollout.episode_timeout: the episode did not end within {facts.timeout_s:g} s"
        return _failed(EpisodeStatus.TIMEOUT, "timeout", Failure("EpisodeTimeout", message, facts.where), rules)
    assert facts.result is not None
    caught = facts.engine_failure
    if facts.result.finished and caught is not None and _ended_by(facts.outcomes, explained=True) is None:
        # agents of many libraries turn an error into their answer, which would be judged as if the model had said it
        failure = _noted(Failure(type(caught).__name__, str(caught)), "the workflow caught this and returned")
        return Ending(EpisodeStatus.ENGINE_ERROR, failure=failure, retry=True)
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
    why = f"no reward: see ajet.failure_reward.{ending.open_by}"
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
    if result.failed_in == "isolation" or facts.engine_failure is not None or result.engine_error:
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
    return Ending(status, float(treatment), failure, is_success=False, by_rule=True)


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


Outcomes = list[Judgement] | Failure


class LateJudge:
    """The rewards that are still to come."""

    def __init__(self, load: Callable[[], BaseJudge | None], rollout: RolloutSection) -> None:
        """`load` is called when the first episode waits."""
        self._load = load
        self._rollout = rollout
        self._timeout_s = None if debugging() else rollout.episode_timeout
        self._threads = EpisodeThreads()
        self._judge: GroupJudge | None = None
        self._waiting: dict[str, JudgedEpisode] = {}

    def expect(self, episode: Episode, workflow_task: WorkflowTask, result: WorkflowResult) -> None:
        """An episode has ended whose judge returned `Later`."""
        output = WorkflowOutput(
            is_success=result.is_success,
            metadata=result.metadata or result.judged,
            log_metrics=result.log_metrics,
        )
        calls = [
            JudgedCall(call.agent, call.new_messages, call.reply) for call in episode.tree.calls if call.run != ROOT
        ]
        task = workflow_task.model_copy(update={"gym_env": None})
        self._waiting[episode.episode_id] = JudgedEpisode(task, output, calls, result.later or Later())

    def waits(self, episode: Episode) -> bool:
        return episode.episode_id in self._waiting

    async def per_episode(self) -> bool:
        return (await self._judge_now()).per_episode

    async def compares(self) -> bool:
        """Whether the judge decides about whole groups. Asked before any episode waits, for any judge."""
        judge: BaseJudge | None = self._judge
        if judge is None:
            judge = await asyncio.to_thread(self._load)
        return isinstance(judge, GroupJudge) and not judge.per_episode

    async def settle(self, episodes: Sequence[Episode], stop: asyncio.Event) -> None:
        """Judge those of these episodes that wait, together. Setting `stop` ends it."""
        asked = [episode for episode in episodes if self.waits(episode)]
        if not asked:
            return
        began = time.monotonic()
        outcome = await self._outcome([self._waiting[episode.episode_id] for episode in asked], stop)
        for index, episode in enumerate(asked):
            judged = self._waiting.pop(episode.episode_id)
            episode.timings["judge"] = episode.timings.get("judge", 0.0) + time.monotonic() - began
            if isinstance(outcome, Failure):
                cancelled = stop.is_set()
                leave_without(episode, EpisodeStatus.CANCELLED if cancelled else EpisodeStatus.JUDGE_ERROR, outcome)
            else:
                _reward(episode, outcome[index], judged)

    def forget(self, episodes: Sequence[Episode]) -> None:
        """End as `cancelled` those that wait: their rewards aren't needed."""
        for episode in episodes:
            if self._waiting.pop(episode.episode_id, None) is not None:
                leave_without(episode, EpisodeStatus.CANCELLED, Failure("EpisodeCancelled", "not needed, not judged"))

    async def _judge_now(self) -> GroupJudge:
        if self._judge is None:
            judge = await asyncio.to_thread(self._load)
            if not isinstance(judge, GroupJudge):
                raise ConfigError(
                    f"ajet.task_judge.judge_protocol: {type(judge).__name__} returned Later, which only a class "
                    "derived from ajet.task_judge.base_judge.GroupJudge may"
                )
            rollout = self._rollout
            if rollout.enable_oversample and rollout.oversample_keep == "first_ended" and not judge.per_episode:
                raise ConfigError(
                    "ajet.rollout.oversample_keep: first_ended chooses episodes by their rewards, and "
                    f"{type(judge).__name__} gives them only once the group has ended. Set oversample_keep: "
                    "first_started"
                )
            self._judge = judge
        return self._judge

    async def _outcome(self, episodes: list[JudgedEpisode], stop: asyncio.Event) -> Outcomes:
        judge = await self._judge_now()
        thread = self._threads.start(lambda: _ask(judge, episodes, self._rollout.episode_retries))
        stopped = asyncio.create_task(stop.wait())
        result = asyncio.ensure_future(asyncio.wrap_future(thread.result))
        try:
            both: list[asyncio.Future[Any]] = [stopped, result]
            await asyncio.wait(both, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if result.done() and not result.cancelled():
                outcome: Outcomes = result.result()
                return outcome
            if stop.is_set():
                return Failure("EpisodeCancelled", "the run was stopped before the judge had decided")
            where = thread.stack()
            message = f"ajet.rollout.episode_timeout: the judge did not decide within {self._timeout_s:g} s"
            return Failure("JudgeTimeout", message, where)
        finally:
            stopped.cancel()
            self._threads.release(thread)
            result.cancel()
            await asyncio.gather(stopped, result, return_exceptions=True)


async def _ask(judge: GroupJudge, episodes: list[JudgedEpisode], retries: int) -> Outcomes:
    """Ask in the judge's thread."""

    async def ask() -> list[Judgement]:
        value = await called(judge.compute_group_rewards, episodes)
        return validate_rewards(value, len(episodes), type(judge).__name__)

    try:
        return await asked_again(ask, retries)
    except WorkflowInterrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - user code: whatever it raises ends only these episodes
        return describe(error)


def _reward(episode: Episode, judgement: Judgement, judged: JudgedEpisode) -> None:
    episode.reward = judgement.reward
    said = judged.workflow_output.is_success
    episode.is_success = judgement.is_success if said is None else said
    episode.reward_parts, episode.reward_weights = judgement.parts, judgement.weights
    if judgement.notes:
        episode.metadata = {**episode.metadata, "judge": judgement.notes}


def leave_without(episode: Episode, status: EpisodeStatus, failure: Failure) -> None:
    """End an episode without a reward after all: none of its tokens is trained."""
    episode.status, episode.failure, episode.reward, episode.is_success = status, failure, None, None
    untrain(episode.tree, episode.ledger, "failed_episode")


class JudgeHere:
    """Asks the judge about episodes whose workflow ran elsewhere, each in a thread of its own."""

    def __init__(self, judge: BaseJudge | None, retries: int) -> None:
        self._judge = judge
        self._retries = retries
        self._threads = EpisodeThreads()

    async def decide(self, result: WorkflowResult, attempt: AttemptHandle) -> None:
        """Ask it if the result has no reward, and note what it says."""
        judge = self._judge
        if judge is None or result.failed_in == "isolation":
            return
        early = None if result.finished else attempt.ended_early(result.explained)
        output = WorkflowOutput(is_success=result.is_success, metadata=result.metadata, log_metrics=result.log_metrics)

        async def ask_ending(explained: bool) -> EarlyEnding | None:
            return early

        task, on_judge = attempt.workflow_task, attempt.on_judge
        thread = self._threads.start(
            lambda: judge_result(result, judge, task, output, self._retries, ask_ending, on_judge)
        )
        try:
            await asyncio.wrap_future(thread.result)
        finally:
            self._threads.release(thread)

    async def aclose(self) -> None:
        """Interrupt what is still being asked although its episode has ended."""
        await self._threads.interrupt_all()
