"""A page in Chinese shows the commands and outputs of its English page, and has as many sections."""

from __future__ import annotations

import re

import pytest

from support.pages import ROOT, blocks_of

TRANSLATED = sorted(page.name for page in (ROOT / "docs" / "zh").glob("*.md"))


@pytest.mark.parametrize("name", TRANSLATED)
def test_the_code_blocks_are_those_of_the_english_page(name: str) -> None:
    english, chinese = (ROOT / "docs" / name, ROOT / "docs" / "zh" / name)
    assert [block.code for block in blocks_of(chinese)] == [block.code for block in blocks_of(english)]
    headings = [len(re.findall("^#+ ", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in (english, chinese)]
    assert headings[0] == headings[1]


def test_the_readmes_show_the_same_commands() -> None:
    english, chinese = (
        [re.sub(r"#.*|<.*?>", "", block.code).split() for block in blocks_of(ROOT / name) if block.language == "bash"]
        for name in ("README.md", "README.zh.md")
    )
    assert chinese == english
