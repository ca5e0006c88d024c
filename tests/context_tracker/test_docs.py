"""The program in the documentation runs, and prints what the page shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "context_tracker.md"


def test_the_page_s_program_prints_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    file = tmp_path / "program.py"
    file.write_text(program)
    runpy.run_path(str(file))
    assert capsys.readouterr().out == output
