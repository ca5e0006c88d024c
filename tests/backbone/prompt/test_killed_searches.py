"""Searches that are killed or interrupted: what was announced is never lost, and a resume repeats at most one round."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.prompt.journal import read_best, read_history
from ajet.cli.main import main
from ajet.observe.episode_store import EpisodeStore
from support import SUPPORT, in_process
from support.searchers import project

pytestmark = pytest.mark.slow

SEARCH = SUPPORT / "search_until_killed.py"


def kill_and_resume(folder: Path, kills: int, seed: int = 0) -> int:
    """Kill a search so often, at random moments. Returns how many rounds survived them all."""
    draw = random.Random(seed)
    announced, score = -1, 0.0
    for _ in range(kills):
        child = subprocess.Popen([sys.executable, str(SEARCH), str(folder)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        resumed = child.stdout.readline().split()
        assert resumed[0] == "resumed" and int(resumed[1]) >= max(announced, 0), (resumed, announced)
        killer = threading.Timer(draw.uniform(0.0, 0.3), child.kill)
        killer.start()
        for line in child.stdout:  # ends when it dies
            if not line.endswith("\n"):
                break  # killed while it announced
            said, number, value = line.split()
            assert said == "round"
            announced, score = int(number), float(value)
        killer.join()
        assert child.wait() == -signal.SIGKILL
        if announced >= 0:
            best = read_best(folder)
            assert best["score"] >= score, "the best that was announced is on disk"
            assert read_history(folder / "prompts/history.jsonl").earlier.round >= announced
    return announced


def test_the_best_survives_kills(tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path, 6) > 0


def start(conf: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ajet", "--conf", str(conf), "--backbone=prompt"]
    return subprocess.Popen(command, cwd=conf.parent, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The best of a search that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    conf = project(folder, algorithm="apo", prompt_tuning__rounds=3)
    assert main(["--conf", str(conf), "--backbone=prompt", "--quiet", "--exp-dir", str(folder)]) == 0
    return read_best(folder / "x-prompt")


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_command_resumes_after_a_signal(tmp_path: Path, stop: signal.Signals, undisturbed: dict[str, Any]) -> None:
    conf = project(tmp_path, algorithm="apo", prompt_tuning__rounds=3)
    running = start(conf)
    assert running.stdout is not None and running.stderr is not None
    while not (line := running.stdout.readline()).startswith("round 1/3"):
        assert line, running.stderr.read()
    running.send_signal(stop)
    rest, errors = running.communicate(timeout=60)
    assert running.returncode in (-signal.SIGKILL, 130), (rest, errors)
    assert "Traceback" not in errors
    folder = tmp_path / "saved_experiments/x-prompt"
    first = read_best(folder)
    done = in_process.ajet(tmp_path, "--conf", str(conf), "--backbone=prompt")
    assert done.returncode == 0, done.stderr
    assert "resumed after round" in done.stdout and "round 1/3" not in done.stdout
    assert read_best(folder)["score"] >= first["score"]
    assert read_best(folder)["templates"] == undisturbed["templates"]


def test_a_search_that_was_killed_before_its_first_round_begins_again(tmp_path: Path) -> None:
    conf = project(tmp_path, prompt_tuning__rounds=1)
    assert main(["--conf", str(conf), "--backbone=prompt", "--quiet", "--exp-dir", str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs/x-prompt"
    recorded = len(list(EpisodeStore(folder / "episodes.sqlite").all()))
    shutil.rmtree(folder / "prompts")
    assert main(["--conf", str(conf), "--backbone=prompt", "--quiet", "--exp-dir", str(tmp_path / "runs")]) == 0
    assert len(list(EpisodeStore(folder / "episodes.sqlite").all())) == recorded


def test_a_closed_pipe_ends_it_like_ctrl_c(tmp_path: Path) -> None:
    conf = project(tmp_path, prompt_tuning__rounds=50, prompt_tuning__proposal_retries=0)
    running = start(conf)
    assert running.stdout is not None and running.stderr is not None
    while not running.stdout.readline().startswith("start:"):
        pass
    running.stdout.close()
    errors = running.stderr.read()
    running.wait(timeout=60)
    assert "Traceback" not in errors
    assert read_best(tmp_path / "saved_experiments/x-prompt")["candidate"]
