"""The programs on the pages about tools and sandboxes print what the pages show."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from support.pages import ROOT, blocks_of


def block(page: str, mark: str) -> str:
    (code,) = [block.code for block in blocks_of(ROOT / "docs" / page) if mark in block.code]
    return code


@pytest.mark.parametrize(
    ("page", "program", "shown", "needs"),
    [
        ("tools.md", "def weather(", "sun for 2 days\n1844", "sh"),
        ("sandboxes.md", "open_sandbox(SandboxSettings(", "1 b'42", "bwrap"),
    ],
)
def test_programs(
    page: str, program: str, shown: str, needs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(needs) is None:
        pytest.skip(f"needs {needs}")
    (tmp_path / "program.py").write_text(block(page, program))
    runpy.run_path(str(tmp_path / "program.py"))
    assert capsys.readouterr().out == block(page, shown)
