"""`LateJudge`: gives the rewards of episodes whose judge decides after they have ended (`GroupJudge`).

Until then an episode carries a reward that only stands in. `settle` replaces it: by the judge's reward, or by nothing
if the judge fails (`judge_error`) or the run is stopped (`cancelled`). Lives on the service loop; the judge itself runs
in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ajet.context_tracker.samples import untrain
from ajet.schema.call_tree import ROOT
from ajet.schema.episode import Episode, EpisodeStatus, Failure
from ajet.schema.errors import ConfigError, JudgeFault, UserError
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Judgement, Later, validate_reward
from ajet.task_judge.group_judge import GroupJudge, JudgedCall, JudgedEpisode
from ajet.task_runner.attempt import EndedEarly
from ajet.task_runner.off_loop import run_with_pauses
from ajet.task_runner.results import EarlyEnding, WorkflowInterrupted, WorkflowResult, called, describe, judge_result
from ajet.task_runner.threads import EpisodeThreads

log = logging.getLogger(__name__)

Outcomes = list[Judgement] | Failure


class LateJudge:
    """The rewards that are still to come."""

    def __init__(
        self,
        load: Callable[[], BaseJudge | None],
        threads: EpisodeThreads,
        *,
        timeout_s: float | None,
        retries: int,
        whole_groups: bool = True,
    ) -> None:
        """`load` is called when the first episode waits. Without `whole_groups`, a judge of groups is refused."""
        self._load = load
        self._threads = threads
        self._timeout_s = timeout_s
        self._retries = retries
        self._whole_groups = whole_groups
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
        """Whether the episode's reward is still to come."""
        return episode.episode_id in self._waiting

    async def per_episode(self) -> bool:
        """Whether the judge is asked about each episode by itself."""
        return (await self._judge_now()).per_episode

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
        """Nobody needs the rewards of these: end those that wait as `cancelled`."""
        for episode in episodes:
            if self._waiting.pop(episode.episode_id, None) is not None:
                leave_without(episode, EpisodeStatus.CANCELLED, Failure("EpisodeCancelled", "not needed, not judged"))

    async def _judge_now(self) -> GroupJudge:
        if self._judge is None:
            judge = await asyncio.to_thread(self._load)
            if not isinstance(judge, GroupJudge):
                raise ConfigError(
                    f"ajet.task_judge.judge_protocol: {type(judge).__name__} returned Later, which only a class "
                    "derived from ajet.task_judge.group_judge.GroupJudge may"
                )
            if not judge.per_episode and not self._whole_groups:
                raise ConfigError(
                    "ajet.rollout.oversample_keep: first_ended chooses episodes by their rewards, and "
                    f"{type(judge).__name__} gives them only once the group has ended. Set oversample_keep: "
                    "first_started"
                )
            self._judge = judge
        return self._judge

    async def _outcome(self, episodes: list[JudgedEpisode], stop: asyncio.Event) -> Outcomes:
        judge = await self._judge_now()
        thread = self._threads.start(lambda: _ask(judge, episodes, self._retries))
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
    """In the judge's thread. A judge that raised is asked again, unless its answer was invalid."""
    for attempt in range(retries + 1):
        try:
            value = await called(judge.compute_group_rewards, episodes)
            return _checked(value, len(episodes), type(judge).__name__)
        except WorkflowInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - user code: whatever it raises ends only these episodes
            if attempt == retries or isinstance(error, JudgeFault | UserError):
                return describe(error)
            log.warning("the judge raised %s: %s; asking it again", type(error).__name__, error)
    raise AssertionError("unreachable")


def _checked(value: object, count: int, judge_name: str) -> list[Judgement]:
    if not isinstance(value, list | tuple) or len(value) != count:
        said = f"{len(value)} of them" if isinstance(value, list | tuple) else f"a value of type {type(value).__name__}"
        raise JudgeFault(
            f"{judge_name}.compute_group_rewards should return a list of {count} rewards, one per episode, but "
            f"returned {said}"
        )
    return [validate_reward(each, judge_name) for each in value]


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


async def judge_here(
    result: WorkflowResult, judge: BaseJudge | None, task: WorkflowTask, ended_early: EndedEarly, retries: int
) -> None:
    """Ask the judge if the result has no reward, and note what it says."""
    if judge is None or result.failed_in == "isolation":
        return
    early = None if result.finished else ended_early(result.explained)
    output = WorkflowOutput(is_success=result.is_success, metadata=result.metadata, log_metrics=result.log_metrics)

    async def ask_ending(explained: bool) -> EarlyEnding | None:
        return early

    def ask() -> None:
        with asyncio.Runner() as loop:
            work = judge_result(result, judge, task, output, retries, ask_ending)
            run_with_pauses(loop.get_loop(), work)

    await asyncio.to_thread(ask)
