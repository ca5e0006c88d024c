"""A stranger's way from the clone over the demo and an agent of their own to exported weights: few commands, all
from the page, run in one go; they print what it shows, but for figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.first_hour import commands, outputs


def shape(text: str) -> list[str]:
    """The lines without figures, marks of a sparkline, times and padding."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"eta .*|[0-9a-f]{12,}|\d+ (?:s|min|h|d)( ago)?\b|just now", "", line)
        line = re.sub(r"[▁▂▃▄▅▆▇█]+|[-+]?[\d.,]+(?:e[-+]?\d+)?k?", "", line)
        lines.append(" ".join(line.split()))
    return [line for line in lines if line]


def test_it_is_not_far() -> None:
    way = commands()
    assert way[0].startswith("git clone") and way[1] == "make demo" and way[-1].startswith("ajet export weights")
    assert any(line.startswith("ajet init") for line in way)
    assert len(way) <= 20, way


@pytest.mark.slow
def test_every_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    for command, shown, printed in outputs(folder):
        assert shape(printed) == shape(shown), command
    assert list(folder.rglob("my-model/model.safetensors"))
