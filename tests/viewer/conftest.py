"""A viewer over a made-up experiment, and a real Chromium to look at it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from synthetic_run import write_experiment

from ajet.viewer.serve import Viewer, ViewerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
expect.set_options(timeout=30_000)  # a busy machine is no failure
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs."""
    root = tmp_path_factory.mktemp("experiments")
    write_experiment(root, "math-agent", steps=20, tasks=3, seed=0)
    write_experiment(root, "math-agent-rloo", steps=12, tasks=2, seed=1)
    return root


def start(root: Path) -> Viewer:
    viewer = Viewer(ViewerSettings(root=root, port=0))
    threading.Thread(target=viewer.serve, daemon=True).start()
    return viewer


@pytest.fixture(scope="session")
def viewer(experiments: Path) -> Viewer:
    return start(experiments)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: while Playwright is at work, no other test of this process can run an event loop."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


SETTLED = """() => {
  const done = (id, ready) => !document.getElementById(id) || ready(document.getElementById(id));
  return document.readyState === "complete"
    && done("experiments", (table) => table.tBodies[0].rows.length)
    && done("charts-page", () => document.querySelector(".chart canvas"))
    && done("episodes", () => document.getElementById("count").textContent)
    && done("columns", (columns) => columns.dataset.ready)
    && done("episode", (episode) => episode.dataset.ready)
    && done("view-tokens", (view) => view.hidden || view.dataset.ready);
}"""


def settled(page: Page) -> None:
    """Wait until a page shows its data."""
    page.wait_for_function(SETTLED)


class Watched:
    """A page whose every error is kept."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _failed(self, url: str, why: str | None) -> None:
        if "ERR_ABORTED" not in (why or ""):  # a page that was left while it loaded
            self.errors.append(f"{url}: {why}")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[object]:
    """A function that opens a viewer's page; at the end no page may have had an error."""
    contexts, watched = [], []

    def opened(viewer: Viewer, path: str = "/", *, width: int = 1280, height: int = 800, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"], reduced_motion="reduce",
        )  # fmt: skip
        page = context.new_page()
        watched.append(Watched(page))
        contexts.append(context)
        base = f"http://127.0.0.1:{viewer.port}"
        context.add_cookies([{"name": viewer.access.cookie, "value": viewer.access.cookie_value, "url": base}])
        page.goto(f"{base}{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    errors = [error for one in watched for error in one.errors]
    assert not errors, "\n".join(errors)


@pytest.fixture
def shoot() -> object:
    """Saves a screenshot where `AJET_SCREENSHOTS` says (the docs' pictures are made so); else does nothing."""
    folder = os.environ.get("AJET_SCREENSHOTS")

    def save(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(Path(folder) / f"{name}.png"))

    return save
