"""The documentation's site needs no other host: neither its settings nor its pages load anything from one."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.pages import PAGES, ROOT

SITE = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""What a browser fetches without being asked."""
NOT_FETCHED = {"canonical", "prev", "next", "alternate", "edit"}
"""Links of these kinds only say where something is."""


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("repo_url", "site_url") for text in texts(item)]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else [str(value)]


def test_the_settings_name_no_other_host() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False, "fonts come from Google otherwise"
    assert not [text for text in texts(settings) if "//" in text]
    assert "mermaid" not in str(settings), "the theme loads its script from unpkg.com"


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_load_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^\s*`{3,}\s*\{?\.?mermaid", text, re.MULTILINE), "the theme loads its script from unpkg.com"
    assert not re.findall(r"!\[[^\]]*\]\(\s*<?(?:https?:)?//[^)]*\)", text)
    assert not re.findall(r"<(?:img|script|iframe|link)\b[^>]*(?:https?:)?//", text)


class Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        kinds = set((given.get("rel") or "").split())
        if tag in LOADED and not kinds & NOT_FETCHED:
            self.addresses.append(given.get(LOADED[tag]) or "")


@pytest.mark.slow
def test_the_built_site_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert not [address for address in parser.addresses if re.match(r"(https?:)?//", address)], page
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")
    for sheet in tmp_path.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    listed = re.findall(r"^- \[.+\]\((.+)\): .+$", (tmp_path / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(listed) == {str(page.relative_to(ROOT / "docs")) for page in SITE}
    for place in listed:
        text = (tmp_path / place).read_text(encoding="utf-8")
        assert text.startswith("# ")
