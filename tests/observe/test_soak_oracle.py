"""The soak's oracle finds what it is there to find: planted in a run that was in order."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet.backbone.metrics import episode_metrics
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.episode import EpisodeStatus
from support.soak_oracle import Life, findings
from support.synthetic_run import Vocabulary, math_episode

STEPS = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with what three steps leave behind."""
    experiment, rng, vocabulary = tmp_path / "soak", random.Random(1), Vocabulary()
    experiment.mkdir()
    recorder = EpisodeRecorder(experiment / "episodes.sqlite", tokenizer=vocabulary)
    lines, told = [], []
    for step in range(1, STEPS + 1):
        episodes = [math_episode(vocabulary, rng, task=step, step=step, repeat=repeat) for repeat in range(8)]
        for episode in episodes:
            assert recorder.record(episode, step).result()
            if episode.status is EpisodeStatus.COMPLETED:
                told.append({"id": episode.episode_id, "reward": episode.reward})
        lines.append({"step": step, "time": 1.0, **episode_metrics(episodes)})
    recorder.close()
    (experiment / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "told").write_text("".join(json.dumps(line) + "\n" for line in told))
    (tmp_path / "output").write_text("step 1/3\n")
    return tmp_path


def wrong(run: Path, *lives: Life) -> list[str]:
    found: list[str] = findings(run / "soak", run / "told", run / "output", list(lives))["wrong"]
    return found


def metrics(run: Path, change: Callable[[list[dict[str, float]]], object]) -> None:
    file = run / "soak" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_in_order(run: Path) -> None:
    steady = Life(1, "asyncio", [(step, 500, 40) for step in range(40)])
    assert wrong(run, steady) == []


def test_an_episode_that_is_gone(run: Path) -> None:
    with sqlite3.connect(run / "soak" / "episodes.sqlite") as database:
        database.execute("DELETE FROM episode WHERE id = (SELECT min(id) FROM episode)")
    assert any("episodes stored; the metrics count 24" in one for one in wrong(run))
    (run / "output").write_text("error: episode not recorded: the disk is full\n")
    assert wrong(run) == [], "it was said"


def test_a_step_that_is_there_twice(run: Path) -> None:
    metrics(run, lambda lines: lines.append(lines[-1]))
    assert any("not 1 to 4, each once" in one for one in wrong(run))


def test_tokens_that_are_in_no_episode(run: Path) -> None:
    metrics(run, lambda lines: lines[1].update({"episode/sampled_tokens_total": 5}))
    assert any("its metrics say 5" in one for one in wrong(run))


def test_a_reward_that_no_workflow_gave(run: Path) -> None:
    first, *others = (run / "told").read_text().splitlines()
    cheated = {**json.loads(first), "reward": 1000.0}
    (run / "told").write_text("\n".join([json.dumps(cheated), *others]) + "\n")
    assert any("not 1000.0" in one for one in wrong(run))
    (run / "told").write_text("\n".join(others) + "\n")
    assert any("its workflow returned no reward" in one for one in wrong(run))


def test_memory_and_descriptors_that_grow(run: Path) -> None:
    growing = Life(1, "asyncio", [(step, 500 + 20 * step, 40 + 2 * step) for step in range(60)])
    said = " ".join(wrong(run, growing))
    assert "memory of a asyncio life" in said and "descriptors of a asyncio life" in said


def test_a_traceback(run: Path) -> None:
    (run / "output").write_text("step 1/3\nTraceback (most recent call last):\n  File x\nKeyError\n")
    assert any("KeyError" in one for one in wrong(run))
