"""The architecture page's table of folders is the one that the layering test enforces."""

from __future__ import annotations

import re
from pathlib import Path

from test_layering import MAY_IMPORT

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `ajet/([\w/]+?)(/|\.py)` \| .+ \| (.+) \|$", re.MULTILINE)


def test_the_table_of_folders_is_the_layering_tests() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {name: cell for name, _, cell in ROW.findall(page)}
    for conductor in ("backbone", "cli", "trainer_api"):
        assert rows.pop(conductor) == "everything above"
    stated = {name: set() if cell == "nothing of ours" else set(cell.split(", ")) for name, cell in rows.items()}
    assert stated == MAY_IMPORT


def test_every_folder_of_the_table_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name, suffix, _ in ROW.findall(page):
        assert (ROOT / "ajet" / f"{name}{suffix}").exists(), name
