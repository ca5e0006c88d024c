"""Groups: refilled, dropped, oversampled, stopped; and never a run ended by an episode."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.episode import CallTree, Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import LostThreadsError
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.pool import RolloutPool
from support.waiting import until

FAULT = EpisodeStatus.ENGINE_ERROR
DROPPED = EpisodeStatus.WORKFLOW_ERROR
UNJUDGED = EpisodeStatus.JUDGE_ERROR
End = float | EpisodeStatus
Script = Callable[[WorkflowTask], tuple[float, End]]
"""What becomes of an attempt: seconds, and its reward or how it failed."""


@dataclass
class ScriptedRunner:
    """Stands for the task runner: attempts take the time and get the reward that a script says."""

    script: Script
    late_judge: None = None
    running: int = 0
    peak: int = 0
    seen: list[WorkflowTask] = field(default_factory=list)
    groups: set[tuple[str, int, int]] = field(default_factory=set)

    async def run(
        self,
        workflow_task: WorkflowTask,
        *,
        group_id: str,
        step: int,
        occurrence: int,
        stop: asyncio.Event,
    ) -> Episode:
        self.groups.add((group_id, step, occurrence))
        self.seen.append(workflow_task)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            seconds, end = self.script(workflow_task)
            failed = isinstance(end, EpisodeStatus)
            status, reward = (end, None) if failed else (EpisodeStatus.COMPLETED, end)
            try:
                async with asyncio.timeout(seconds):
                    await stop.wait()
                    status, reward = EpisodeStatus.CANCELLED, None
            except TimeoutError:
                pass
        finally:
            self.running -= 1
        return Episode(
            workflow_task.episode_uuid,
            workflow_task.task_id,
            status,
            CallTree(),
            Ledger(),
            group_id=group_id,
            repeat=workflow_task.task_thread_index,
            reward=reward,
            failure=None if reward is not None else Failure("X", "x"),
        )


def task(name: str = "t", **metadata: Any) -> Task:
    return Task(task_id=name, metadata=metadata)


def group_of(script: Script, *, validation: bool = False, **overrides: Any) -> tuple[EpisodeGroup, ScriptedRunner]:
    config = make_config({f"rollout.{key}": value for key, value in overrides.items()})
    runner = ScriptedRunner(script)

    async def main() -> EpisodeGroup:
        pool = RolloutPool(runner, config)  # type: ignore[arg-type]
        return await pool.run_group(task(), group_id="g", step=2, validation=validation)

    return asyncio.run(main()), runner


def rewards(*values: End, seconds: float = 0.0) -> Script:
    """One after the other, the last one again and again."""
    line = itertools.chain(values, itertools.repeat(values[-1]))
    return lambda _task: (seconds, next(line))


def test_a_group_is_num_repeat_attempts_with_their_places() -> None:
    group, runner = group_of(rewards(0.0, 1.0, 0.5), num_repeat=3)
    assert group.complete and not group.failed
    assert [(episode.repeat, episode.reward) for episode in group.episodes] == [(0, 0.0), (1, 1.0), (2, 0.5)]
    assert {episode.group_id for episode in group.episodes} == {"g"}
    assert len({attempt.episode_uuid for attempt in runner.seen}) == 3


def test_faults_are_replaced() -> None:
    group, runner = group_of(rewards(FAULT, 1.0, FAULT, 0.0, 0.5), num_repeat=4)
    assert group.complete
    assert (len(group.episodes), len(group.failed), len(runner.seen)) == (4, 2, 6)


def test_dropped_episodes_make_the_group_smaller() -> None:
    group, runner = group_of(rewards(DROPPED, 1.0, DROPPED, 0.0), num_repeat=4)
    assert group.complete
    assert (len(group.episodes), len(group.failed), len(runner.seen)) == (2, 2, 4)


def test_a_group_needs_two_episodes_to_compare() -> None:
    group, runner = group_of(rewards(DROPPED, 1.0, DROPPED, DROPPED), num_repeat=4)
    assert (group.complete, len(group.episodes), len(runner.seen)) == (False, 1, 4)
    alone, _ = group_of(rewards(1.0), num_repeat=1)
    assert alone.complete


def test_faults_and_drops_in_one_group() -> None:
    group, runner = group_of(rewards(DROPPED, FAULT, 1.0, 0.0, 0.5), num_repeat=4)
    assert (group.complete, len(group.episodes), len(runner.seen)) == (True, 3, 5)


def test_a_number_is_taken_literally() -> None:
    group, runner = group_of(rewards(FAULT, 1.0, FAULT, 0.0), num_repeat=4, min_group_size=2)
    assert (group.complete, len(group.episodes), len(runner.seen)) == (True, 2, 4)
    group, runner = group_of(rewards(DROPPED, 1.0, 0.0, 0.5), num_repeat=4, min_group_size=4)
    assert (group.complete, len(group.episodes), len(runner.seen)) == (False, 3, 4)
    group, runner = group_of(rewards(DROPPED, 1.0, 0.0, 0.5), num_repeat=4, min_group_size=1)
    assert (group.complete, len(group.episodes)) == (True, 3)


def test_a_judge_that_fails_costs_its_group_and_nothing_is_replaced() -> None:
    group, runner = group_of(rewards(UNJUDGED, FAULT, 1.0, 0.0, 0.5), num_repeat=4)
    assert (group.complete, len(runner.seen)) == (False, 4)
    assert len(group.episodes) == 2  # they are played to the end, and counted


def test_a_hopeless_group_is_given_up_and_never_trained() -> None:
    group, runner = group_of(rewards(FAULT), num_repeat=4)
    assert not group.complete and not group.episodes
    assert len(runner.seen) == 8  # num_repeat, and as many refills


def test_what_still_runs_of_a_hopeless_group_is_stopped() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, End]:
        return (0.0, FAULT) if attempt.task_thread_index else (60.0, 1.0)

    group, _ = group_of(script, num_repeat=2)
    assert not group.complete
    assert Counter(episode.status for episode in group.failed) == {
        FAULT: 3,
        EpisodeStatus.CANCELLED: 1,
    }


FIRST_ENDED = {"enable_oversample": True, "oversample_keep": "first_ended"}


def test_oversampling_stops_as_soon_as_rewards_differ() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, End]:
        return [(0.01, 0.0), (0.02, 1.0), (60.0, 1.0)][attempt.task_thread_index]

    group, runner = group_of(script, num_repeat=2, submit_oversample_multiplier=1.5, **FIRST_ENDED)
    assert len(runner.seen) == 3
    assert group.complete and [episode.reward for episode in group.episodes] == [0.0, 1.0]
    assert [episode.status for episode in group.failed] == [EpisodeStatus.CANCELLED]


def test_oversampling_waits_for_a_reward_that_differs() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, End]:
        return [(0.01, 1.0), (0.02, 1.0), (0.05, 0.0), (60.0, 0.5)][attempt.task_thread_index]

    group, _ = group_of(script, num_repeat=2, submit_oversample_multiplier=2, **FIRST_ENDED)
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0]
    assert len(group.failed) == 2


def test_a_reward_differs_from_those_that_count_and_not_from_a_dropped_episode() -> None:
    ends: list[End] = [DROPPED, 1.0, 1.0, 1.0, 0.0]

    def script(attempt: WorkflowTask) -> tuple[float, End]:
        number = attempt.task_thread_index
        return (0.02 * number, ends[number]) if number < len(ends) else (60.0, 0.5)

    group, _ = group_of(script, num_repeat=3, submit_oversample_multiplier=2, **FIRST_ENDED)
    assert group.complete and [episode.reward for episode in group.episodes] == [1.0, 0.0]


def test_what_was_started_first_is_kept_however_late_it_ends() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, End]:
        return [(0.05, 1.0), (0.1, 1.0), (0.01, 0.0), (60.0, 0.5)][attempt.task_thread_index]

    group, runner = group_of(script, num_repeat=2, enable_oversample=True, submit_oversample_multiplier=2)
    assert len(runner.seen) == 4
    assert group.complete and [episode.repeat for episode in group.episodes] == [0, 1]
    assert sorted(episode.status for episode in group.failed) == [EpisodeStatus.CANCELLED, EpisodeStatus.COMPLETED]


def test_oversampled_episodes_stand_in_for_faults_but_not_for_drops() -> None:
    group, runner = group_of(
        rewards(FAULT, 1.0, 0.0, 0.5), num_repeat=2, enable_oversample=True, submit_oversample_multiplier=2
    )
    assert group.complete and len(runner.seen) == 4
    assert [episode.repeat for episode in group.episodes] == [1, 2]
    group, _ = group_of(
        rewards(DROPPED, 1.0, 0.0, 0.5), num_repeat=3, enable_oversample=True, submit_oversample_multiplier=2
    )
    assert group.complete and [episode.repeat for episode in group.episodes] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "share", "slow_share"),
    [("first_started", (0.2, 0.2), (0.5, 0.5)), ("first_ended", (0.225, 0.3), (0, 0.45))],
)
def test_only_what_was_started_first_is_an_unbiased_sample(
    keep: str, share: tuple[float, float], slow_share: tuple[float, float]
) -> None:
    """The mean reward of the kept episodes, where 1 in 5 succeeds; and where 1 in 2 succeeds, more slowly."""

    def mean(success: float, seconds: Callable[[float], float]) -> float:
        draws = random.Random(0)
        config = make_config(
            {
                "rollout.num_repeat": 4,
                "rollout.max_env_worker": 4096,
                "rollout.enable_oversample": True,
                "rollout.submit_oversample_multiplier": 1.5,
                "rollout.oversample_keep": keep,
            }
        )

        def script(_attempt: WorkflowTask) -> tuple[float, End]:
            reward = float(draws.random() < success)
            return seconds(reward), reward

        async def main() -> list[EpisodeGroup]:
            pool = RolloutPool(ScriptedRunner(script), config)  # type: ignore[arg-type]
            return await pool.run_groups([task(f"t{index}") for index in range(600)])

        groups = asyncio.run(main())
        kept = [episode.reward or 0.0 for group in groups for episode in group.episodes]
        assert len(kept) == 2400
        return sum(kept) / len(kept)

    assert share[0] - 0.025 < mean(0.2, lambda reward: 0.0) < share[1] + 0.025
    assert slow_share[0] - 0.03 < mean(0.5, lambda reward: 0.2 + reward) < slow_share[1] + 0.03


def test_validation_is_neither_refilled_nor_oversampled_nor_stopped() -> None:
    group, runner = group_of(rewards(FAULT), validation=True, enable_oversample=True)
    assert len(runner.seen) == 1
    assert not group.episodes

    def script(attempt: WorkflowTask) -> tuple[float, End]:
        return (0.0, FAULT) if attempt.task_thread_index == 0 else (0.05, 1.0)

    group, runner = group_of(script, validation=True, **{"val_kwargs.num_repeat": 4})
    assert (len(group.episodes), len(group.failed), len(runner.seen)) == (3, 1, 4)


def test_groups_of_one_task_in_a_step_are_told_apart() -> None:
    runner = ScriptedRunner(rewards(1.0))

    async def main() -> None:
        pool = RolloutPool(runner, make_config())  # type: ignore[arg-type]
        first = [task("a"), task("b"), task("a")]
        await pool.run_groups(first, step=2)
        await pool.run_groups([task("a")], step=2, earlier=first)

    asyncio.run(main())
    assert runner.groups == {("2-0-a", 2, 0), ("2-1-b", 2, 0), ("2-2-a", 2, 1), ("2-3-a", 2, 2)}


def test_so_many_at_once_over_all_groups() -> None:
    config = make_config({"rollout.max_env_worker": 5, "rollout.num_repeat": 4})
    runner = ScriptedRunner(rewards(1.0, seconds=0.01))
    ended: list[Episode] = []

    async def main() -> list[EpisodeGroup]:
        pool = RolloutPool(runner, config, on_episode=ended.append)  # type: ignore[arg-type]
        return await pool.run_groups([task(f"t{index}") for index in range(6)], step=3)

    groups = asyncio.run(main())
    assert runner.peak == 5
    assert [group.task_id for group in groups] == [f"t{index}" for index in range(6)]
    assert len(ended) == 24
    assert all(episode.timings["queue"] >= 0 for episode in ended)
    assert {attempt.task_batch_index for attempt in runner.seen} == set(range(6))


def test_one_at_a_time_while_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_DEBUG_TAGS", "X")
    _, runner = group_of(rewards(1.0, seconds=0.01))
    assert runner.peak == 1


def test_stopping_ends_running_and_waiting_episodes() -> None:
    config = make_config({"rollout.max_env_worker": 2})
    runner = ScriptedRunner(rewards(1.0, seconds=60))

    async def main() -> list[EpisodeGroup]:
        pool = RolloutPool(runner, config)  # type: ignore[arg-type]
        running = asyncio.create_task(pool.run_groups([task("a"), task("b")]))
        await until(lambda: pool.running == 8 and runner.running == 2)
        pool.stop_all()
        groups = await running
        assert pool.running == 0
        return groups

    groups = asyncio.run(main())
    assert not any(group.complete for group in groups)
    assert all(episode.status is EpisodeStatus.CANCELLED for group in groups for episode in group.failed)
    assert runner.running == 0


def test_what_ends_the_run_comes_out_bare_and_leaves_nothing_running() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, End]:
        if attempt.task_id == "b":
            raise LostThreadsError("too many")
        return 60.0, 1.0

    runner = ScriptedRunner(script)

    async def main() -> None:
        pool = RolloutPool(runner, make_config())  # type: ignore[arg-type]
        with pytest.raises(LostThreadsError):
            await pool.run_groups([task("a"), task("b")])
        assert (pool.running, runner.running) == (0, 0)

    asyncio.run(main())


def test_cancelling_a_batch_leaves_nothing_running() -> None:
    runner = ScriptedRunner(rewards(1.0, seconds=60))

    async def main() -> None:
        pool = RolloutPool(runner, make_config())  # type: ignore[arg-type]
        running = asyncio.create_task(pool.run_groups([task("a"), task("b")]))
        await until(lambda: runner.running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (pool.running, runner.running) == (0, 0)

    asyncio.run(main())


def test_the_tag_of_a_task_is_its_metadatas() -> None:
    runner = ScriptedRunner(rewards(1.0))

    async def main() -> None:
        pool = RolloutPool(runner, make_config())  # type: ignore[arg-type]
        await pool.run_episode(task(tag="hard"))

    asyncio.run(main())
    assert runner.seen[0].task_tag == "hard"
