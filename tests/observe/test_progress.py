"""What a run shows: live, plain, JSON, quiet."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ajet.observe import logs
from ajet.observe.logs import FileLog, level_from_environment, log_to_terminal
from ajet.observe.progress import Progress, ProgressMode
from ajet.observe.progress_live import sparkline
from ajet.schema.call_tree import CallTree, Run
from ajet.schema.episode import Episode, EpisodeStatus, Failure, Ledger


def episode(reward: float | None) -> Episode:
    failure = None if reward is not None else Failure("ValueError", "no such tool\nsecond line")
    status = EpisodeStatus.COMPLETED if reward is not None else EpisodeStatus.WORKFLOW_ERROR
    tree = CallTree(runs=[Run(np.arange(3, dtype=np.int32), -1, 0)])
    return Episode("e1", "t1", status, tree, Ledger(), reward=reward, failure=failure)


def run(mode: ProgressMode) -> str:
    stream = io.StringIO()
    with Progress.create(mode, stream) as progress:
        progress.start("math", "local", total_steps=10)
        progress.phase("rollout", 2)
        progress.episode(episode(1.0))
        progress.episode(episode(None))
        progress.phase("train")
        progress.step(1, {"reward/mean": 0.25, "train/loss": 0.00001234, "other": 1.0})
        progress.message("saved [checkpoint] step_1", "warning")
    return stream.getvalue()


def test_plain_lines() -> None:
    lines = run(ProgressMode.PLAIN).splitlines()
    assert lines[0] == "math (local, 10 steps)"
    assert lines[1] == "  workflow_error: episode e1: no such tool"
    assert lines[2].startswith("step 1/10  reward 0.25  loss 1.234e-05")
    assert lines[3] == "warning: saved [checkpoint] step_1"


def test_json_lines() -> None:
    records = [json.loads(line) for line in run(ProgressMode.JSON).splitlines()]
    assert [record["event"] for record in records] == [
        "started", "phase", "episode", "episode", "phase", "step", "message",
    ]  # fmt: skip
    assert records[5]["metrics"]["other"] == 1.0 and records[3]["failure"]["kind"] == "ValueError"


def test_quiet_shows_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ProgressMode.QUIET) == ""
    progress = Progress.create(ProgressMode.QUIET)
    progress.message("it broke", "error")
    assert capsys.readouterr().err == "error: it broke\n"


def test_live_display_draws_and_shows_text_as_text() -> None:
    text = run(ProgressMode.LIVE)
    assert "math" in text and "saved [checkpoint] step_1" in text and "1/10" in text


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([1.0, 1.0]) == "▁▁" and sparkline([]) == ""


def test_the_level_decides_what_the_terminal_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setenv("AJET_LOG_LEVEL", "warning")
    log_to_terminal()
    logger = logging.getLogger("ajet.test")
    logger.info("hidden")
    logger.error("judge failed")
    assert capsys.readouterr().err == "error: judge failed\n"
    monkeypatch.setenv("AJET_LOG_LEVEL", "nonsense")
    assert level_from_environment() == logging.INFO


def test_the_log_rotates_and_loses_none_of_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FILE_BYTES", 2000)
    monkeypatch.setattr(logs, "_FILES", 3)
    file = FileLog(tmp_path / "run.log")
    try:
        for index in range(200):
            logging.getLogger("ajet.test").info("line %d", index)
    finally:
        file.close()
    kept = sorted(tmp_path.iterdir(), reverse=True)
    assert [path.name for path in kept] == ["run.log.2", "run.log.1", "run.log"]
    assert all(path.stat().st_size <= 2000 for path in kept)
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines] == [f"line {index}" for index in range(200 - len(lines), 200)]
