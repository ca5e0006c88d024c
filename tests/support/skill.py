"""The skill of `ajet init --skill` as data: its commands in the order of its steps, and the files that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

FENCE = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((references/\w+\.md)\)")


def scripts(skill: Path) -> list[str]:
    """The commands of each step, those of the page that it links to behind its own."""
    found: list[str] = []
    text = (skill / "SKILL.md").read_text(encoding="utf-8")
    for step in re.split(r"^(?=\d+\. )", text, flags=re.MULTILINE)[1:]:
        pages = [step, *((skill / name).read_text(encoding="utf-8") for name in LINK.findall(step))]
        found += [dedent(block[3]) for page in pages for block in FENCE.findall(page) if block[1] == "bash"]
    return found


def written_files(skill: Path) -> dict[str, str]:
    """The files that it shows whole, by name."""
    pages = [page.read_text(encoding="utf-8") for page in skill.rglob("*.md")]
    return {block[2]: dedent(block[3]) for page in pages for block in FENCE.findall(page) if block[2]}
