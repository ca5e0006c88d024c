"""Runs of a tutorial for tests: one episode with scripted replies, `--backbone=debug`, and two steps of training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from ajet.config import load_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.metrics import read_metrics
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tutorial"
TINY = "model.path=tiny:qwen2-0.3m"
SMALL = [
    TINY, "data.train_batch_size=2", "rollout.num_repeat=2", "trainer_common.test_freq=0", "trainer_common.save_freq=0",
    "trainer_common.val_before_train=false", "trainer_common.total_training_steps=2", "rollout.max_num_seqs=8",
]  # fmt: skip


def play(monkeypatch: pytest.MonkeyPatch, conf: str, task: Task, replies: Any, *overrides: str) -> Episode:
    """An episode with these replies: a list, whose last one repeats, or a function of the call."""
    monkeypatch.chdir(ROOT)
    config = load_config(TUTORIAL / conf, [TINY, *overrides])

    def says(call: ScriptedCall) -> object:
        return replies(call) if callable(replies) else replies[min(call.index, len(replies) - 1)]

    engine = ScriptedEngine(says, lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        return runtime.run(runtime.pool.run_episode(task))


def debug(monkeypatch: pytest.MonkeyPatch, conf: str, folder: Path, *overrides: str) -> list[Episode]:
    """`ajet --conf … --backbone=debug`, and the episodes that it recorded."""
    monkeypatch.chdir(ROOT)
    arguments = ["--conf", f"tutorial/{conf}", "--backbone=debug", "--exp-dir", str(folder), TINY, *overrides]
    assert main(arguments) == 0
    (made,) = folder.glob("*-debug")
    store = EpisodeStore(made / "episodes.sqlite")
    try:
        return [record.episode for record in store.all()]
    finally:
        store.close()


def train(
    monkeypatch: pytest.MonkeyPatch, conf: str, folder: Path, *overrides: str, codes: Sequence[int] = (0, 1)
) -> list[dict[str, Any]]:
    """Two steps on `local`; their metrics. Exit code 1: they ran, and a random model's rewards taught nothing."""
    monkeypatch.chdir(ROOT)
    assert main(["--conf", f"tutorial/{conf}", "--exp-dir", str(folder), *SMALL, *overrides]) in codes
    (metrics,) = folder.glob("*/metrics.jsonl")
    steps = read_metrics(metrics)
    assert len(steps) == 2 and all("reward/mean" in step for step in steps)
    return steps


@contextmanager
def imports(folder: str) -> Iterator[None]:
    """The modules of a tutorial's folder can be imported inside, as its programs do; they are forgotten afterwards."""
    path = str(TUTORIAL / folder)
    before = set(sys.modules)
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(path):
                del sys.modules[name]
