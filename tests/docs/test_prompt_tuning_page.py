"""The example of `docs/prompt_tuning.md`: its files, and the report that it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT, Block, blocks_of

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "prompt_tuning.md"
REPORT = "ended      all rounds were run\n"
GRADING = """
RULES = ("capacity", "equipment", "calendar", "price")


def grade(task, prompt, reply):
    # the toy model can't follow a rule, so its prompt is graded in its place
    rule = RULES[task.metadata["rule"]]
    return float(rule in prompt), "" if rule in prompt else f"it ignored the {rule}"


def propose(request):
    # a language model in ten lines: criticises by repeating the feedback, edits by naming what the criticism names
    if request.kind == "critique":
        return "; ".join(sorted({trial.feedback for trial in request.trials if trial.feedback})) or "all is well"
    said = request.feedback or "; ".join(trial.feedback for trial in request.trials)
    missing = [rule for rule in RULES if f"ignored the {rule}" in said][:1]
    return f"{request.candidate.texts['booking']} Mind the {' '.join(missing)}."
"""
"""What the page leaves to the reader."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("booking")
    for block in (block for block in blocks_of(PAGE) if block.title):
        (folder / block.title).write_text(block.code)
    (folder / "grading.py").write_text(GRADING)
    config = folder / "booking.yaml"
    config.write_text(f"{config.read_text()}    proposer: grading.py->propose\n")
    tasks = [
        {"main_query": f"A room for meeting {n}", "task_id": f"m{n}", "metadata": {"rule": n % 4}} for n in range(48)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


def started(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def timeless(text: str) -> str:
    """The report without the seconds that it took."""
    return re.sub(r", \d+ s$", "", text, flags=re.MULTILINE)


def block(start: str) -> Block:
    (found,) = [block for block in blocks_of(PAGE) if block.code.startswith(start)]
    return found


def test_the_run_prints_what_the_page_shows(project: Path) -> None:
    printed = started(project, "-m", "ajet", "--conf", "booking.yaml", "--backbone=prompt")
    assert timeless(printed[printed.index(REPORT) :]) == timeless(block(REPORT).code)


def test_the_program_finds_a_template(project: Path) -> None:
    (project / "program.py").write_text(block("from ajet import Trainer\n").code)
    assert re.search(r"^Find a room: \{request\} Mind the \w+\.", started(project, "program.py"), re.MULTILINE)
