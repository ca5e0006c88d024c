"""The architecture page's table of rooms is the list that the layering test enforces."""

from __future__ import annotations

import re

from test_layering import ROOMS

from support import ROOT

ROW = re.compile(r"^\| `ajet/(\w+)/` \| .+ \|$", re.MULTILINE)


def test_the_table_holds_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")
    assert ROW.findall(page) == ROOMS
