"""Every message that `docs/faq.md` explains is one that AgentJet, or Python, prints."""

from __future__ import annotations

import asyncio
import re

import pytest

from support.pages import ROOT

SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "ajet").rglob("*.py")))
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]+) \|", PAGE[PAGE.index("## Errors by their text") :], re.MULTILINE)


def joined(text: str) -> str:
    """Without the breaks of long string literals."""
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("row", ROWS)
def test_the_message_exists(row: str) -> None:
    for words in re.findall(r"`([^`]+)`", row):
        assert words in joined(SOURCE) or words in _of_python(), words


def test_rows_are_found() -> None:
    assert len(ROWS) > 15


def _of_python() -> str:
    async def within() -> None:
        work = asyncio.sleep(0)
        try:
            asyncio.run(work)
        finally:
            work.close()

    with pytest.raises(RuntimeError) as found:
        asyncio.run(within())
    return str(found.value)
