"""Shares and paired differences against enumerations and tables of their own; the list of tasks, a task's attempts, and
the spread of rewards, from recorded episodes."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

import pytest

from ajet.config import make_config
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.statistics import (
    Gain,
    RewardCount,
    Share,
    TaskFilter,
    reward_counts,
    reward_histograms,
    sign_flip_p,
    t_quantile,
    task_history,
    task_page,
)
from ajet.schema.episode import Episode, EpisodeStatus, Failure
from ajet.schema.task import Task
from support.synthetic_run import Vocabulary, math_episode


def test_intervals_are_wilsons() -> None:
    assert Share.of([0.0] * 10) == pytest.approx((0, 0, 0.2775), abs=1e-3)
    assert Share.of([1.0] * 10) == pytest.approx((1, 0.7225, 1), abs=1e-3)
    assert Share.of([1.0] * 8 + [0.0] * 8) == pytest.approx((0.5, 0.28, 0.72), abs=1e-2)


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (30, 2.04227), (127, 1.97882), (100_000, 1.95999)],
)
def test_t_quantiles_are_those_of_the_table(freedom: int, table: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, rel=2e-4)


def enumerated(differences: list[float]) -> float:
    """The definition: all 2^n signs."""
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(value >= abs(math.fsum(differences)) - 1e-9 for value in sums) / len(sums)


def test_few_tasks_are_counted_out() -> None:
    dice = random.Random(3)
    for count in range(1, 11):
        differences = [dice.choice((-0.5, -0.25, 0.0, 0.25, 0.5, 1.0)) for _ in range(count)]
        assert sign_flip_p(differences) == pytest.approx(enumerated(differences))
    assert sign_flip_p([0.0, 0.0]) == 1
    assert sign_flip_p([1.0] * 5) == 2 / 32


def test_many_tasks_are_drawn_and_agree_with_the_enumeration() -> None:
    dice = random.Random(5)
    differences = [dice.gauss(0.3, 1) for _ in range(14)]
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=0.015)
    assert sign_flip_p(differences) == sign_flip_p(differences)


def test_a_gain_is_measured_on_the_tasks_of_both() -> None:
    before = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 1.0, "only before": 1.0}
    after = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.75, "only after": 0.0}
    gain = Gain.of(before, after)
    assert gain is not None and (gain.tasks, gain.unshared, gain.better, gain.worse) == (4, 2, 2, 1)
    # by hand: mean 0.125, sum of squares about it 0.3125, standard error sqrt(0.3125 / 3 / 4)
    half = 3.18245 * math.sqrt(0.3125 / 12)
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.125, 0.125 - half, 0.125 + half), abs=1e-3)
    assert gain.p == pytest.approx(enumerated([0.5, 0.25, 0.0, -0.25]))
    assert str(gain).startswith("+0.125  (-0.389 … +0.639)  p 0.75")


def test_the_pairing_finds_what_two_intervals_hide() -> None:
    before = {str(n): n / 30 for n in range(30)}
    after = {name: value + 0.05 + 0.01 * (-1) ** int(name) for name, value in before.items()}
    apart = Share.of(list(before.values())), Share.of([min(1, value) for value in after.values()])
    gain = Gain.of(before, after)
    assert gain is not None and gain.low > 0 and gain.p < 0.001
    assert apart[0].high > apart[1].low


def test_too_little_to_say() -> None:
    assert Gain.of({"a": 1.0}, {"b": 1.0}) is None
    one = Gain.of({"a": 0.0}, {"a": 1.0})
    assert one is not None and one.p == 1 and one.low < 0 < one.high and "one task: no interval" in str(one)
    assert one.interval == "–"


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
    everything, _ = task_page(store, TaskFilter())
    assert everything[0].attempts == 5
    EpisodeRecorder(
        store.path, make_config({"task_judge.success_threshold": 0.4}).ajet
    ).close()  # the run goes on with another one
    lenient, _ = task_page(store, TaskFilter(validation=False))
    assert lenient[1].by_step == [(1, 0.0), (3, 1.0)]


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
