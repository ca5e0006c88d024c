"""The commands of the pages that show a whole session print what the page shows, but for figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.console import PAGES, outputs


def shape(text: str) -> list[str]:
    """The lines without figures, marks of a sparkline, times and padding."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"eta .*|[0-9a-f]{12,}|\d+ (?:s|min|h|d)( ago)?\b|just now", "", line)
        line = re.sub(r"[▁▂▃▄▅▆▇█]+|[-+]?[\d.,]+(?:e[-+]?\d+)?k?", "", line)
        lines.append(" ".join(line.split()))
    return [line for line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    (home := tmp_path.resolve() / "home").mkdir()
    for command, shown, printed in outputs(page, home):
        assert shape(printed) == shape(shown), command
