"""The READMEs' example runs as it is, and learns something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT, blocks_of

READMES = ("README.md", "README.zh.md")


def block(readme: str, first_line: str) -> str:
    """The code block that begins with `# <file name>`, or has that title."""
    found = [
        block.code
        for block in blocks_of(ROOT / readme)
        if block.code.startswith(first_line) or (block.title and first_line == f"# {block.title}")
    ]
    assert len(found) == 1, f"{readme} has {len(found)} blocks that begin with {first_line!r}"
    return found[0]


def written(readme: str, folder: Path) -> list[str]:
    """Writes the example's files. Returns the command that runs it."""
    for name in ("agent.py", "tasks.jsonl", "sums.yaml"):
        (folder / name).write_text(block(readme, f"# {name}"))
    return [sys.executable, "-m", "ajet", "--conf", "sums.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_the_example_runs(readme: str, tmp_path: Path) -> None:
    command = [*written(readme, tmp_path), "--backbone=debug", "rollout.max_env_worker=1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 episodes, 0 without a reward" in run.stdout


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    run = subprocess.run(written("README.md", tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = (tmp_path / "saved_experiments" / "sums" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert rewards[0] < 0.05 and rewards[-1] > 0.4, rewards
    assert "warning" not in run.stderr, "a first run has nothing to be warned of"
