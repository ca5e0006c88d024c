"""What a finished run prints at its end, from its folder: any run with validations tells what became better."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rich.cells import cell_len

from ajet.backbone.launch import _what_is_saved, what_it_is_about
from ajet.backbone.report import report_text
from ajet.observe.metrics import read_metrics
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from support.pages import ROOT
from support.synthetic_run import Vocabulary, math_episode, task_of

RETURNS = {0: 0.0, 10: 0.5, 20: 1.0}


def attempt(task: int, step: int, reward: float | None, repeat: int = 0) -> Episode:
    rng = random.Random(f"{task} {step} {repeat}")
    episode = math_episode(Vocabulary(), rng, task=task, step=step, repeat=repeat, skill=reward or 0.0)
    episode.reward = reward
    return episode


def folder_of(path: Path, steps: int = 20, **validations: list[Episode]) -> Path:
    """A run's folder with these episodes, by `after_STEP`."""
    lines = [{"step": 0, "time": 0.0}] + [
        {"step": step, "time": 0.0, "train/return/mean": step / steps, "time/step": 1.0} for step in range(1, steps + 1)
    ]
    recorder = EpisodeRecorder(path / "episodes.sqlite")
    for name, episodes in validations.items():
        step = int(name.removeprefix("after_"))
        lines[step] |= {"val/return/mean": RETURNS[step], "val/success": RETURNS[step], "val/failed_share": 0.0}
        for episode in episodes:
            recorder.record(episode, step, None, validation=True, task=task_of(episode))
    recorder.close()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def told(folder: Path, width: int = 100, *, example: bool = False, whole: bool = True) -> str:
    steps = read_metrics(folder / "metrics.jsonl")
    return report_text(steps, folder, None, width=width, example=example, whole=whole)


def test_the_question_that_gained_most_is_shown_before_and_after(tmp_path: Path) -> None:
    first = [attempt(0, 0, 0.5), attempt(1, 0, 0.0), attempt(2, 0, 1.0), attempt(3, 0, None)]
    last = [attempt(0, 20, 0.5), attempt(1, 20, 1.0), attempt(1, 20, 0.0, repeat=1), attempt(2, 20, 0.25)]
    folder = folder_of(tmp_path, after_0=first, after_10=[], after_20=last)
    text = told(folder)
    assert "answered better" not in told(folder, whole=False), "the episodes that went well are missing"
    question, before, after, count = text[text.index("question  ") :].splitlines()[:4]
    assert question.startswith("question         A shop sells 19 boxes a day with 16 ") and " … " in question
    assert before.startswith("before training  Each day 19 boxes") and before.endswith("}   reward 0")
    assert after.startswith("after step 20    Each day 19 boxes") and after.endswith("}   reward 1")
    assert count.strip() == "1 of 3 questions answered better than at first, 1 worse"


def test_both_curves_run_over_the_same_steps(tmp_path: Path) -> None:
    first, last = [attempt(0, 0, 0.0)], [attempt(0, 20, 1.0)]
    text = told(folder_of(tmp_path, after_0=first, after_10=[], after_20=last))
    assert "training return  0.050 ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███ 1.000" in text
    assert "validation       0.000 ▁▁▁▁▁▁▁▁▁▁▅▅▅▅▅▅▅▅▅▅█ 1.000" in text


@pytest.mark.parametrize("width", [40, 64, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    folder = folder_of(tmp_path, steps=400, after_0=[attempt(0, 0, 0.0)], after_20=[attempt(0, 20, 1.0)])
    starts = ("question ", "before training ", "after step 20 ", "training return ", "validation  ")
    lines = [line for line in told(folder, width).splitlines() if line.startswith(starts)]
    assert len(lines) == len(starts)
    assert all(cell_len(line) <= min(width, 100) for line in lines), lines


def test_wide_characters_and_control_characters(tmp_path: Path) -> None:
    first, last = attempt(0, 0, 0.0), attempt(0, 20, 1.0)
    for episode in (first, last):
        for call in episode.tree.calls:
            call.reply = {"role": "assistant", "content": "\x1b[2J" + "答案" * 80}
    recorder = EpisodeRecorder(folder_of(tmp_path, after_0=[], after_20=[]) / "episodes.sqlite")
    for episode, step in ((first, 0), (last, 20)):
        recorder.record(
            episode, step, None, validation=True, task=Task(main_query="问题" * 80, task_id=episode.task_id)
        )
    recorder.close()
    text = told(tmp_path, 80)
    assert "\x1b" not in text and "\\x1b[2J" in text
    assert all(cell_len(line) <= 80 for line in text.splitlines() if "答案" in line or "问题" in line)


def test_without_two_recorded_validations_nothing_is_compared(tmp_path: Path) -> None:
    for name, validations in (
        ("none", {}),
        ("one", {"after_20": [attempt(0, 20, 1.0)]}),
        ("other tasks", {"after_0": [attempt(0, 0, 0.0)], "after_20": [attempt(1, 20, 1.0)]}),
        ("not recorded", {"after_0": [], "after_20": []}),
    ):
        (tmp_path / name).mkdir()
        text = told(folder_of(tmp_path / name, **validations))
        assert "question" not in text, name
        assert ("\nvalidation  " in text) == (len(validations) > 1), name
    (tmp_path / "none" / "episodes.sqlite").unlink()
    assert "training return  " in told(tmp_path / "none")


def test_episodes_that_cant_be_read_cost_the_run_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, after_0=[], after_20=[])
    (folder / "episodes.sqlite").write_bytes(b"no database" * 100)
    assert "training return  " in told(folder)
    assert "the report shows no episodes: " in caplog.text


def test_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("saved_experiments/sums")
    folder.mkdir(parents=True)
    folder_of(folder)
    assert told(folder).endswith("\nNext:\n  ajet view sums    # every episode, token by token")
    (folder / "hf").mkdir()
    commands = [line.partition("#")[0].strip() for line in told(folder).partition("Next:\n")[2].splitlines()]
    assert commands == ["ajet view sums", "ajet chat sums", "ajet export weights sums FOLDER"]
    commands = [
        line.partition("#")[0].strip() for line in told(folder, example=True).partition("Next:\n")[2].splitlines()
    ]
    assert commands == ["ajet view sums", "ajet chat sums", "ajet init my-agent"]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("checkpoints/step_4/state.json", "", "Step 4 is saved"),
        ("checkpoints/before-rewind-step_4/state.json", "", "Nothing is saved"),
        ("checkpoints/latest_checkpointed_iteration.txt", "6", "Step 6 is saved"),
        ("checkpoints/latest_checkpointed_iteration.txt", "", "Nothing is saved"),
        ("checkpoints/project/run/latest_checkpointed_iteration.txt", "8", "Step 8 is saved"),
        ("checkpoints/project/run/step_3/hf/config.json", "", "Step 3 is saved"),
        ("prompts/best.yaml", "", "The rounds so far are saved"),
        ("run.log", "", "Nothing is saved"),
    ],
)
def test_an_interrupted_run_says_what_is_saved(tmp_path: Path, file: str, text: str, says: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert _what_is_saved(tmp_path).startswith(says)


def test_the_first_line_of_a_run_is_the_first_sentence_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "learns that its calculator pays" in str(what_it_is_about(ROOT / "configs/quickstart.yaml"))
    for line in ("ajet:", "# sums.yaml", "# ---- main ----", "# Copyright 2020 A. All rights reserved.", ""):
        (tmp_path / "a.yaml").write_text(f"{line}\n# A sentence.\n")
        assert what_it_is_about(tmp_path / "a.yaml") is None, line
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("# A sentence.\n")
    assert what_it_is_about(Path("~/a.yaml")) == "A sentence.", "as `--conf=~/a.yaml` comes from a shell"
