"""Every message that `docs/faq.md` explains is one that AgentJet, or Python, prints."""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest

from support.pages import ROOT

SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "ajet").rglob("*.py"))]
JOINED = re.sub(r'"\s*\n\s*f?"', "", "\n".join([*SOURCES, inspect.getsource(asyncio.runners)]))
"""The source, without the breaks of long string literals."""
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]+) \|", PAGE[PAGE.index("## Errors by their text") :], re.MULTILINE)


@pytest.mark.parametrize("row", ROWS)
def test_the_message_exists(row: str) -> None:
    for words in re.findall(r"`([^`]+)`", row):
        assert words in JOINED, words


def test_rows_are_found() -> None:
    assert len(ROWS) > 15
