"""The coding agent's tutorial: every task fails before the repair, and the scripted run repairs it."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.engine.model_source import ModelSource
from ajet.observe.episode_store import EpisodeStore

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorial" / "example_coding_agent"


def test_every_fault_makes_the_tests_fail(tmp_path: Path) -> None:
    made = runpy.run_path(str(FOLDER / "make_tasks.py"))
    (tmp_path / "test_calc.py").write_text(made["TESTS"])
    faults = [pair for pairs in made["FAULTS"].values() for pair in pairs]
    for right, wrong in [("", ""), *faults]:
        (tmp_path / "calc.py").write_text(made["MODULE"].replace(right, wrong, 1))
        ran = subprocess.run([sys.executable, "-B", "test_calc.py"], cwd=tmp_path, capture_output=True, check=False)
        assert (ran.returncode == 0) == (right == wrong), (right, wrong)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_the_scripted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tutorial"
    shutil.copytree(FOLDER, folder)
    runpy.run_path(str(folder / "make_tasks.py"), run_name="__main__")
    monkeypatch.chdir(tmp_path)
    overrides = ["rollout.engine=scripted", "model.path=tiny:qwen2-0.3m"]
    assert main(["--conf", str(folder / "coding_agent.yaml"), "--backbone=debug", *overrides]) == 0
    store = EpisodeStore(tmp_path / "saved_experiments" / "coding_agent-debug" / "episodes.sqlite")
    episodes = [record.episode for record in store.all()]
    store.close()
    assert [episode.reward for episode in episodes] == [1.0, 1.0]
    assert all(episode.metadata["stop_reason"] == "tool" for episode in episodes)


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's folder where its YAMLs expect it, with the tiny model's data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tutorial" / "example_coding_agent"
    shutil.copytree(FOLDER, folder)
    monkeypatch.syspath_prepend(str(folder / "tiny"))
    runpy.run_path(str(folder / "tiny" / "make_data.py"), run_name="__main__")
    return folder


def test_the_tiny_models_tasks_fail_until_they_are_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(tmp_path, monkeypatch)
    made = runpy.run_path(str(folder / "tiny" / "make_data.py"))
    for index in range(6):
        task = made["task"](random.Random(index), "t")
        place = tmp_path / str(index)
        place.mkdir()
        for path, text in {**task["files"], **task["test_files"]}.items():
            (place / path).write_text(text)
        ran = subprocess.run(task["test_command"], shell=True, cwd=place, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (1, f"{task['broken']} is wrong\n")
        head = f"def {task['broken']}(x):\n    return "
        repaired = task["files"]["m.py"].replace(f"{head}x\n", f"{head}{made['BODIES'][task['broken']]}\n")
        (place / "m.py").write_text(repaired)
        shutil.rmtree(place / "__pycache__", ignore_errors=True)
        ran = subprocess.run(task["test_command"], shell=True, cwd=place, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_two_steps_of_the_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(tmp_path, monkeypatch)
    start = ["trainer_common.total_training_steps=2", "data.train_batch_size=4"]
    assert main(["--conf", str(folder / "tiny" / "cold_start.yaml"), *start]) == 0
    few = [*start, "rollout.num_repeat=2", "trainer_common.val_before_train=false", "trainer_common.test_freq=0"]
    assert main(["--conf", str(folder / "tiny" / "learn.yaml"), *few]) in (0, 1)  # 1: it is too early to solve anything
    store = EpisodeStore(tmp_path / "saved_experiments" / "coding_agent_tiny" / "episodes.sqlite")
    episodes = [record.episode for record in store.all()]
    store.close()
    assert len(episodes) == 16 and {episode.failure for episode in episodes} == {None}
    # what was imitated is what the agent asks: the first prompt is the same, token by token
    talk = json.loads((folder / "tiny" / "data" / "conversations.jsonl").read_text().splitlines()[0])
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    start_of = tokenizer.apply_chat_template(talk["messages"][:1], tools=talk["tools"], tokenize=False)
    for episode in episodes:
        prompt = tokenizer.decode(episode_samples(episode, TrackerSettings())[0][0].prompt_ids)
        assert prompt.startswith(start_of)


@pytest.mark.skipif("AJET_CLI_AGENTS_NODE" not in os.environ, reason="needs `make test-cli-agents`")
def test_codex_repairs_the_tasks_with_scripted_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(tmp_path, monkeypatch)
    runpy.run_path(str(folder / "make_tasks.py"), run_name="__main__")
    given = ["rollout.engine=scripted", "model.path=tiny:qwen2-0.3m"]
    given.append(f"ajet.rollout.agent.installed_in={os.environ['AJET_CLI_AGENTS_NODE']}")
    assert main(["--conf", str(folder / "codex.yaml"), "--backbone=debug", *given]) == 0
    store = EpisodeStore(tmp_path / "saved_experiments" / "coding_agent_codex-debug" / "episodes.sqlite")
    episodes = [record.episode for record in store.all()]
    store.close()
    assert [(episode.reward, episode.metadata["exit_code"]) for episode in episodes] == [(1.0, 0), (1.0, 0)]
