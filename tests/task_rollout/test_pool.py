"""Groups: refilled, dropped, oversampled, stopped; and never a run ended by an episode."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from waiting import until

from ajet.config import make_config
from ajet.schema.call_tree import CallTree
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import LostThreadsError
from ajet.schema.task import Task, WorkflowTask
from ajet.task_rollout.pool import RolloutPool

Script = Callable[[WorkflowTask], tuple[float, float | None]]
"""What becomes of an attempt: seconds, reward (None: it fails)."""


@dataclass
class ScriptedRunner:
    """Stands for the task runner: attempts take the time and get the reward that a script says."""

    script: Script
    running: int = 0
    peak: int = 0
    seen: list[WorkflowTask] = field(default_factory=list)

    async def run(
        self, workflow_task: WorkflowTask, *, validation: bool, group_id: str, step: int, stop: asyncio.Event
    ) -> Episode:
        self.seen.append(workflow_task)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            seconds, reward = self.script(workflow_task)
            status = EpisodeStatus.COMPLETED if reward is not None else EpisodeStatus.WORKFLOW_ERROR
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


def rewards(*values: float | None, seconds: float = 0.0) -> Script:
    """One after the other, the last one again and again."""
    line = itertools.chain(values, itertools.repeat(values[-1]))
    return lambda _task: (seconds, next(line))


def test_a_group_is_num_repeat_attempts_with_their_places() -> None:
    group, runner = group_of(rewards(0.0, 1.0, 0.5), num_repeat=3)
    assert group.complete and not group.failed
    assert [(episode.repeat, episode.reward) for episode in group.episodes] == [(0, 0.0), (1, 1.0), (2, 0.5)]
    assert {episode.group_id for episode in group.episodes} == {"g"}
    assert len({attempt.episode_uuid for attempt in runner.seen}) == 3


def test_failed_attempts_are_replaced() -> None:
    group, runner = group_of(rewards(None, 1.0, None, 0.0, 0.5), num_repeat=4)
    assert group.complete
    assert (len(group.episodes), len(group.failed), len(runner.seen)) == (4, 2, 6)


def test_enough_is_enough() -> None:
    group, runner = group_of(rewards(None, 1.0, None, 0.0), num_repeat=4, min_group_size=2)
    assert group.complete
    assert (len(group.episodes), len(group.failed), len(runner.seen)) == (2, 2, 4)


def test_a_hopeless_group_is_given_up_and_never_trained() -> None:
    group, runner = group_of(rewards(None), num_repeat=4)
    assert not group.complete and not group.episodes
    assert len(runner.seen) == 8  # num_repeat, and as many refills


def test_what_still_runs_of_a_hopeless_group_is_stopped() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, float | None]:
        return (0.0, None) if attempt.task_thread_index else (60.0, 1.0)

    group, _ = group_of(script, num_repeat=2)
    assert not group.complete
    assert Counter(episode.status for episode in group.failed) == {
        EpisodeStatus.WORKFLOW_ERROR: 3,
        EpisodeStatus.CANCELLED: 1,
    }


def test_oversampling_stops_as_soon_as_rewards_differ() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, float | None]:
        return [(0.01, 0.0), (0.02, 1.0), (60.0, 1.0)][attempt.task_thread_index]

    group, runner = group_of(script, num_repeat=2, enable_oversample=True, submit_oversample_multiplier=1.5)
    assert len(runner.seen) == 3
    assert group.complete and [episode.reward for episode in group.episodes] == [0.0, 1.0]
    assert [episode.status for episode in group.failed] == [EpisodeStatus.CANCELLED]


def test_oversampling_waits_for_a_reward_that_differs() -> None:
    def script(attempt: WorkflowTask) -> tuple[float, float | None]:
        return [(0.01, 1.0), (0.02, 1.0), (0.05, 0.0), (60.0, 0.5)][attempt.task_thread_index]

    group, _ = group_of(script, num_repeat=2, enable_oversample=True, submit_oversample_multiplier=2)
    assert [episode.reward for episode in group.episodes] == [1.0, 0.0]
    assert len(group.failed) == 1


def test_oversampling_needs_no_refill_while_enough_run() -> None:
    group, runner = group_of(rewards(None, None, 1.0, 0.0), num_repeat=2, enable_oversample=True,
                             submit_oversample_multiplier=2)  # fmt: skip
    assert group.complete and len(runner.seen) == 4


def test_validation_is_neither_refilled_nor_oversampled() -> None:
    group, runner = group_of(rewards(None), validation=True, enable_oversample=True)
    assert len(runner.seen) == 1
    assert not group.complete


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
    def script(attempt: WorkflowTask) -> tuple[float, float | None]:
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
