"""The architecture page's table of folders names the rooms of the layering test."""

from __future__ import annotations

import re
from pathlib import Path

from test_layering import ROOMS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `ajet/([\w/]+?)(/|\.py)` \| .+ \| (.+) \|$", re.MULTILINE)


def test_the_table_names_no_room_that_is_not_in_the_list() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {name.split("/")[0] for name, _, _ in ROW.findall(page)}
    assert rooms and rooms <= set(ROOMS)


def test_every_folder_of_the_table_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name, suffix, _ in ROW.findall(page):
        assert (ROOT / "ajet" / f"{name}{suffix}").exists(), name
