"""What is kept of each task equals what its episodes say, whatever happened to them, and whoever wrote them."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import Vocabulary, math_episode

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import commit, delete_oldest, open_for_writing
from ajet.observe.recorder import EpisodeRecorder, RecorderSettings
from ajet.observe.task_statistics import TASK_SORT_KEYS, TaskFilter, TaskRow, task_page
from ajet.schema.episode import Episode, EpisodeStatus

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
        EpisodeRecorder(self.path, RecorderSettings(success_threshold=0.5)).close()
        self.recorder = EpisodeRecorder(self.path)

    def cut(self) -> None:
        self.recorder.flush()
        connection = open_for_writing(self.path)
        connection.execute("BEGIN IMMEDIATE")
        delete_oldest(connection, self.draw.randrange(1, 20))
        commit(connection)
        connection.close()


def counted(path: Path, *given: Any, **more: Any) -> tuple[list[TaskRow], int]:
    """The page of a copy without what is kept."""
    copy = path.with_name("counted.sqlite")
    with sqlite3.connect(path) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("DROP TABLE tried_threshold")
    store = EpisodeStore(copy)
    try:
        return task_page(store, *given, **more)
    finally:
        store.close()
        copy.unlink()


def rounded(page: tuple[list[TaskRow], int]) -> tuple[list[Any], int]:
    """Sums of the same numbers in another order may differ in their last digit."""
    rows = [
        replace(
            row,
            **{
                name: round(value, 9)
                for name in ("solved", "change", "reward")
                if (value := getattr(row, name)) is not None
            },
        )
        for row in page[0]
    ]
    return rows, page[1]


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
        asked = {"sort": sort, "descending": descending, "limit": 3, "offset": history.draw.randrange(3)}
        assert rounded(task_page(store, where, **asked)) == rounded(counted(history.path, where, **asked)), (
            where,
            asked,
        )


def older_version_writes(path: Path, statement: str) -> None:
    """As a version does that knows nothing of these tables."""
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


OLDER = {
    "adds": "INSERT INTO episode SELECT id + 1000, 'another', 7, validation, 't0', group_id, repeat, 'x', 'completed', "
    "outcomes, failure, 0.5, NULL, advantage, agents, calls, turns, tokens, sampled, trained, forks, attempts, "
    "seconds, recorded, preview FROM episode LIMIT 1",
    "deletes": "DELETE FROM episode WHERE id % 3 = 0",
    "rewrites": "UPDATE episode SET success = 1 - success, step = step + 1 WHERE id % 2 = 0",
}


@pytest.mark.parametrize("act", list(OLDER))
def test_what_an_older_version_wrote_is_seen_at_once(tmp_path: Path, act: str) -> None:
    history = History(tmp_path / "e.sqlite", 1, ["x"])
    for _ in range(6):
        history.record()
    history.recorder.close()
    store = EpisodeStore(history.path)
    before = rounded(task_page(store, TaskFilter()))
    older_version_writes(history.path, OLDER[act])
    after = rounded(task_page(store, TaskFilter()))
    assert after == rounded(counted(history.path, TaskFilter())) and after != before
    assert store.rows("SELECT 1 FROM tried_dirty"), "readers never write"
    EpisodeRecorder(history.path).close()
    assert not store.rows("SELECT 1 FROM tried_dirty") and rounded(task_page(store, TaskFilter())) == after
    store.close()


def test_a_file_of_an_older_version_is_read_and_gets_its_rows_when_the_run_resumes(tmp_path: Path) -> None:
    history = History(tmp_path / "e.sqlite", 2, ["x"])
    for _ in range(6):
        history.record()
    history.recorder.close()
    new = rounded(task_page(EpisodeStore(history.path), TaskFilter()))
    with sqlite3.connect(history.path) as connection:
        for kind, name in connection.execute("SELECT type, name FROM sqlite_master WHERE name GLOB 'tried_*' "
            "OR type = 'trigger' OR name = 'episode_task_step'").fetchall():  # fmt: skip
            connection.execute(f"DROP {kind} {name}")
        connection.execute("CREATE INDEX episode_task ON episode (task_id)")
        connection.execute("CREATE TABLE task_threshold (value REAL NOT NULL)")
    connection.close()
    store = EpisodeStore(history.path)
    assert rounded(task_page(store, TaskFilter())) == new
    EpisodeRecorder(history.path).close()
    assert store.rows("SELECT 1 FROM tried_row") and rounded(task_page(store, TaskFilter())) == new
    assert not store.rows("SELECT 1 FROM sqlite_master WHERE name = 'task_threshold'")
    store.close()


def test_steps_of_several_blocks_and_below_zero(tmp_path: Path) -> None:
    history = History(tmp_path / "e.sqlite", 3, ["x"])
    for step in (-70, -64, -1, 0, 63, 64, 127, 128, 1000):
        history.recorder.record(replace(history.episode(), episode_id=f"s{step}", status=EpisodeStatus.COMPLETED), step)
    history.recorder.close()
    assert rounded(task_page(EpisodeStore(history.path), TaskFilter())) == rounded(counted(history.path, TaskFilter()))
