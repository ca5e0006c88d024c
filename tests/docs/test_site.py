"""The documentation's site needs no other host: neither its settings nor its pages load anything from one. Its search
finds what newcomers ask for, and every page is two clicks away."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chromium import chromium
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_built_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert not [address for address in parser.addresses if re.match(r"(https?:)?//", address)], page
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")
    assert '<div class="board">' in (site / "dev" / "board" / "index.html").read_text(encoding="utf-8")
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    listed = re.findall(r"^- \[.+\]\((.+)\): .+$", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(listed) == {str(page.relative_to(ROOT / "docs")) for page in SITE}
    for place in listed:
        text = (site / place).read_text(encoding="utf-8")
        assert text.startswith("# ")


FIRST = {
    "install": "Install",
    "cost": "What does a run cost?",
    "GPU": "Do I need a GPU?",
    "DPO": "Can I train with DPO?",
    "vision": "Vision models, pictures, audio?",
    "error": "Questions and errors",
    "offline": "Does it work offline?",
    "viewer": "Viewer",
    "reward": "Rewards and judges",
    "judge": "Rewards and judges",
}
"""What a newcomer types, and the title that the first result must have: the page's, or that of its section found first.
Where another comes first: a heading with that word, and `search: boost:` at the page's top."""
SHOWN = "() => [...document.querySelectorAll('a[href]')].filter(link => link.checkVisibility()).map(link => link.href)"
FOUND = "list => [...list[0].querySelectorAll('h1, h2')].map(title => title.innerText)"


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_search_finds_the_right_page_first(address: str) -> None:
    with chromium() as browser:
        page = browser.new_page()
        for word, title in FIRST.items():
            page.goto(f"{address}?q={word}")
            page.wait_for_selector(".md-search-result__item a", timeout=30_000)
            found = page.eval_on_selector_all(".md-search-result__item", FOUND)
            assert title in found[:2], f"{word}: {found}"


@pytest.mark.slow
def test_every_page_is_two_clicks_away(address: str, site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})

        def links(place: str) -> set[str]:
            page.goto(place)
            shown = {link.partition("#")[0] for link in page.evaluate(SHOWN)}
            return {link for link in shown if link.startswith(address)}

        near = links(address)
        reached = near.union(*(links(place) for place in near))
    pages = {f"{address}{file.parent.relative_to(site)}/" for file in site.rglob("index.html") if file.parent != site}
    assert pages - reached == set()
    assert len(pages) > 40
