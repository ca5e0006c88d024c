"""What is kept of each task equals what its episodes say, whatever happened to them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import commit, delete_oldest, open_for_writing
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.statistics import TASK_SORT_KEYS, TaskFilter, TaskRow, task_page
from ajet.schema.episode import Episode, EpisodeStatus
from support.synthetic_run import Vocabulary, math_episode
from support.task_counts import counted_tasks

REWARDS = [None, 0.0, 0.25, 0.5, 1.0, 1.5]
FILTERS = [
    TaskFilter(), TaskFilter(validation=True), TaskFilter(validation=False), TaskFilter(tag="x"), TaskFilter(text="T1"),
    TaskFilter(solved_min=0.3, solved_max=0.8), TaskFilter(solved_max=0.0, validation=False, tag="y"),
]  # fmt: skip


class History:
    """A file that is written to as runs do: recorded, recorded again, rewound, cut, and resumed."""

    def __init__(self, path: Path, seed: int, tags: list[str]) -> None:
        self.path, self.draw, self.tags = path, random.Random(seed), tags
        self.pattern = math_episode(Vocabulary(), self.draw)
        self.step = 0
        self.recorder = EpisodeRecorder(path)

    def episode(self) -> Episode:
        draw = self.draw
        task = draw.randrange(5)
        ids = {"episode_id": f"e{draw.randrange(60)}", "task_id": f"t{task}", "group_id": "g"}
        status = draw.choice([EpisodeStatus.COMPLETED] * 5 + [EpisodeStatus.CANCELLED])
        said = {"reward": draw.choice(REWARDS), "is_success": draw.choice([None, None, True, False]), "status": status}
        return replace(self.pattern, **ids, **said, tag=self.tags[task % len(self.tags)], failure=None)

    def record(self) -> None:
        for _ in range(self.draw.randrange(1, 12)):
            self.recorder.record(self.episode(), self.step, validation=self.draw.random() < 0.2)
        self.step += self.draw.random() < 0.7

    def rewind(self) -> None:
        self.step = self.draw.randrange(self.step + 1)
        self.recorder.rewind(self.step)

    def resume(self) -> None:
        self.recorder.close()
        self.recorder = EpisodeRecorder(self.path)

    def other_threshold(self) -> None:
        self.recorder.close()
        EpisodeRecorder(self.path, make_config({"task_judge.success_threshold": 0.5}).ajet).close()
        self.recorder = EpisodeRecorder(self.path)

    def cut(self) -> None:
        self.recorder.flush()
        connection = open_for_writing(self.path)
        connection.execute("BEGIN IMMEDIATE")
        delete_oldest(connection, self.draw.randrange(1, 20))
        commit(connection)
        connection.close()


def rounded(rows: list[TaskRow]) -> list[TaskRow]:
    """Sums of the same numbers in another order may differ in their last digit."""

    def of(value: float | None) -> float | None:
        return None if value is None else round(value, 9)

    return [replace(row, solved=of(row.solved), change=of(row.change), reward=of(row.reward)) for row in rows]


def in_order(rows: list[TaskRow], sort: str, descending: bool) -> list[TaskRow]:
    """As the database sorts: what has no value is the least, and equal ones stay in the order of their ids."""

    def place(row: TaskRow) -> tuple[bool, Any]:
        value = getattr(row, sort)
        return value is not None, 0 if value is None else value

    return sorted(rows, key=place, reverse=descending)


@pytest.mark.parametrize("tags", [["x", "y"], ["x", "", "y", "x", "x"]], ids=["two", "some empty"])
@pytest.mark.parametrize("seed", range(6))
def test_pages_equal_those_counted_from_the_episodes(tmp_path: Path, seed: int, tags: list[str]) -> None:
    history = History(tmp_path / "e.sqlite", seed, tags)
    acts = [history.record] * 6 + [history.rewind, history.resume, history.cut, history.other_threshold]
    for _ in range(25):
        history.draw.choice(acts)()
    history.record()
    history.recorder.close()
    store = EpisodeStore(history.path)
    assert store.rows("SELECT 1 FROM tried_row") and not store.rows("SELECT 1 FROM tried_dirty")
    sorts = history.draw.sample(TASK_SORT_KEYS, 3)
    for where, sort, descending in product(FILTERS, sorts, [False, True]):
        offset = history.draw.randrange(3)
        rows, total = task_page(store, where, sort=sort, descending=descending, limit=3, offset=offset)
        expected = in_order(rounded(counted_tasks(store, where)), sort, descending)
        assert (rounded(rows), total if rows else len(expected)) == (expected[offset : offset + 3], len(expected))


def test_steps_of_several_blocks_and_below_zero(tmp_path: Path) -> None:
    history = History(tmp_path / "e.sqlite", 3, ["x"])
    for step in (-70, -64, -1, 0, 63, 64, 127, 128, 1000):
        history.recorder.record(replace(history.episode(), episode_id=f"s{step}", status=EpisodeStatus.COMPLETED), step)
    history.recorder.close()
    store = EpisodeStore(history.path)
    assert rounded(task_page(store, TaskFilter())[0]) == rounded(counted_tasks(store))
