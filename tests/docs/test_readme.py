"""The READMEs' example runs as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks_of

READMES = ("README.md", "README.zh.md")


def block(readme: str, first_line: str) -> str:
    """The code block that begins with `# <file name>`."""
    found = [block.code for block in blocks_of(ROOT / readme) if block.code.startswith(first_line)]
    assert len(found) == 1, f"{readme} has {len(found)} blocks that begin with {first_line!r}"
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_the_example_runs(readme: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(block(readme, "# agent.py"))
    (tmp_path / "capitals.yaml").write_text(block(readme, "# capitals.yaml"))
    task = {"question": "What is the capital of France?", "answer": "Paris"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    run = subprocess.run(
        [sys.executable, "-m", "ajet", "--conf", "capitals.yaml", "--backbone=debug", "rollout.max_env_worker=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 episode, 0 without a reward" in run.stdout
