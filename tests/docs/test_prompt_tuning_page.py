"""The example of `docs/prompt_tuning.md`, as printed: its files, its commands, its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT, Block, blocks_of

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "prompt_tuning.md"
RUN = "$ python make_tasks.py && ajet --conf booking.yaml --backbone=prompt\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("booking")
    for block in (block for block in blocks_of(PAGE) if block.title):
        (folder / block.title).write_text(block.code)
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


def timeless(text: str) -> list[str]:
    """The lines without what depends on the machine's speed."""
    lines = [line for line in text.splitlines() if not re.match(r"  \w+ \d+/\d+$", line)]
    return [re.sub(r"  eta .*|, \d+ s$", "", line) for line in lines]


def block(start: str) -> Block:
    (found,) = [block for block in blocks_of(PAGE) if block.code.startswith(start)]
    return found


def test_the_run_prints_what_the_page_shows(project: Path) -> None:
    started(project, "make_tasks.py")
    printed = started(project, "-m", "ajet", "--conf", "booking.yaml", "--backbone=prompt")
    assert timeless(printed) == timeless(block(RUN).code.removeprefix(RUN))


def test_the_program_finds_a_template(project: Path) -> None:
    started(project, "make_tasks.py")
    (project / "program.py").write_text(block("from ajet import Trainer\n").code)
    assert re.search(r"^Find a room: \{request\} Mind the \w+\.", started(project, "program.py"), re.MULTILINE)
