"""The list of tasks, a task's attempts, and the spread of rewards, from recorded episodes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.task_statistics import (
    RewardCount,
    TaskFilter,
    reward_counts,
    reward_histograms,
    task_history,
    task_page,
)
from ajet.schema.episode import Episode, EpisodeStatus, Failure
from ajet.schema.task import Task
from support.synthetic_run import Vocabulary, math_episode

REWARDS = {
    ("easy", 1): [1.0, 0.0], ("easy", 2): [1.0, 1.0], ("hard", 1): [0.0, 0.0], ("hard", 3): [None, 0.4],
    ("lost", 3): [0.0, 0.0], ("spent", 1): [None],
}  # fmt: skip
"""By task and step. None: the attempt failed."""


def attempt(vocabulary: Vocabulary, task: str, step: int, reward: float | None, number: int) -> Episode:
    episode = math_episode(vocabulary, random.Random(f"{task} {step} {number}"))
    episode.episode_id, episode.task_id, episode.group_id = f"{task}-{step}-{number}", task, f"{task}-{step}"
    episode.reward, episode.is_success, episode.tag, episode.repeat = reward, None, task[0], number
    episode.status, episode.outcomes = EpisodeStatus.COMPLETED, ()
    episode.failure = None
    if reward is None:
        episode.status, episode.failure = EpisodeStatus.WORKFLOW_ERROR, Failure("ValueError", "no answer")
    return episode


@pytest.fixture
def store(tmp_path: Path) -> EpisodeStore:
    vocabulary = Vocabulary()
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite", tokenizer=vocabulary)
    for (task, step), rewards in REWARDS.items():
        for number, reward in enumerate(rewards):
            episode = attempt(vocabulary, task, step, reward, number)
            recorder.record(episode, step, task=Task(main_query=f"An {task} question", task_id=task))
    stopped = attempt(vocabulary, "easy", 2, None, 7)
    stopped.status = EpisodeStatus.CANCELLED
    recorder.record(stopped, 2)
    recorder.record(attempt(vocabulary, "easy", 2, 0.0, 8), 2, validation=True)
    recorder.close()
    return EpisodeStore(tmp_path / "episodes.sqlite")


def test_tasks_have_their_share_of_solved_attempts_by_step(store: EpisodeStore) -> None:
    rows, total = task_page(store, TaskFilter(validation=False))
    assert total == 4 and [row.task_id for row in rows] == ["easy", "hard", "lost", "spent"]
    easy, hard, _, spent = rows
    assert (easy.attempts, easy.solved, easy.latest, easy.change, easy.last_step) == (4, 0.75, 1.0, 0.5, 2)
    assert easy.by_step == [(1, 0.5), (2, 1.0)], "stopped attempts and validation don't count"
    assert (hard.attempts, hard.failed) == (4, 1)
    assert (hard.solved, hard.reward) == (0.0, pytest.approx(0.4 / 3)), "a failed attempt counts in no share and mean"
    assert (spent.failed, spent.solved, spent.latest, spent.change, spent.reward, spent.by_step) == (1, *[None] * 4, [])
    lenient, _ = task_page(store, TaskFilter(validation=False), threshold=0.4)
    assert lenient[1].by_step == [(1, 0.0), (3, 1.0)]
    everything, _ = task_page(store, TaskFilter())
    assert everything[0].attempts == 5


def test_tasks_are_filtered_sorted_and_paged(store: EpisodeStore) -> None:
    names = lambda *given, **more: [row.task_id for row in task_page(store, *given, **more)[0]]  # noqa: E731
    assert names(TaskFilter(text="EASY quest")) == ["easy"]
    assert names(TaskFilter(text="%")) == [], "no wildcards"
    assert names(TaskFilter(tag="h")) == ["hard"]
    assert names(TaskFilter(solved_max=0.0)) == ["hard", "lost"]
    assert names(TaskFilter(), sort="solved", descending=True)[0] == "easy"
    rows, total = task_page(store, TaskFilter(), offset=1, limit=1)
    assert [row.task_id for row in rows] == ["hard"] and total == 4
    with pytest.raises(ValueError, match="can't sort"):
        task_page(store, TaskFilter(), sort="task_id; DROP TABLE episode")  # type: ignore[arg-type]


def test_capitals_of_any_script_are_found(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    asked = Task(main_query="Сколько яблок?", task_id="École")
    recorder.record(attempt(Vocabulary(), "École", 1, 1.0, 0), 1, task=asked)
    recorder.close()
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    for text in ("Сколько", "сколько ЯБЛОК", "école"):
        assert task_page(store, TaskFilter(text=text))[1] == 1


def test_the_attempts_of_a_task(store: EpisodeStore) -> None:
    attempts = task_history(store, "hard")
    assert [(one["step"], one["solved"], one["failure"]) for one in attempts] == [
        (1, False, ""), (1, False, ""), (3, False, "ValueError"), (3, False, ""),
    ]  # fmt: skip
    assert task_history(store, "no such task") == []
    assert len(task_history(store, "hard", limit=1)) == 1


def test_few_rewards_are_bins_of_their_own(store: EpisodeStore) -> None:
    (histogram,) = reward_histograms([reward_counts(store)])
    assert histogram.bins == [(0.0, 0.0), (0.4, 0.4), (1.0, 1.0)] and histogram.steps == [1, 2, 3]
    assert histogram.counts == [[3, 0, 1], [0, 0, 2], [2, 1, 0]]


def test_many_rewards_are_counted_in_equal_ranges(tmp_path: Path) -> None:
    vocabulary = Vocabulary()
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite", tokenizer=vocabulary)
    rewards = [index / 40 - 0.5 for index in range(41)]
    for number, reward in enumerate(rewards):
        recorder.record(attempt(vocabulary, "one", 1, reward, number), 1)
    recorder.close()
    many = reward_counts(EpisodeStore(tmp_path / "episodes.sqlite"))
    (histogram,) = reward_histograms([many])
    assert histogram.bins[0][0] == -0.5 and histogram.bins[-1][1] == 0.5
    assert sum(histogram.counts[0]) == 41 and min(histogram.counts[0]) >= 2
    few = [RewardCount(1, 2.5, 3), RewardCount(4, -0.5, 1)]
    both = reward_histograms([many, few, []])
    assert both[0].bins == both[1].bins == both[2].bins, "they can be compared"
    assert both[0].bins[0][0] == -0.5 and both[0].bins[-1][1] == 2.5
    assert both[1].steps == [1, 4] and both[1].counts[0][-1] == 3 and both[1].counts[1][0] == 1
    assert both[2].steps == [] and sum(both[0].counts[0]) == 41


def test_what_the_reader_gave_of_a_task(store: EpisodeStore) -> None:
    task = store.task("hard")
    assert task is not None and task.main_query == "An hard question" and store.task("none") is None
