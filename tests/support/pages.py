"""The documentation as data: its pages and their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "tutorial").glob("*/README.md")),
    *sorted((ROOT / "ajet/cli/skill").rglob("*.md")),
)

FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])
        for found in FENCE.finditer(text)
    ]


def blocks(*languages: str) -> list[Block]:
    """Every block of these languages on any page."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]
