"""The coding agent's tutorial: every task fails before the repair, and the scripted run repairs it."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.cli.main import main
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
