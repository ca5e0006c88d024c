"""A viewer of a folder, and waiting until its page has drawn everything."""

from __future__ import annotations

import threading
from pathlib import Path

from playwright.sync_api import Page
from starlette.testclient import TestClient

from ajet.observe.viewer.library import Library
from ajet.observe.viewer.pages import Access
from ajet.observe.viewer.serve import Viewer, create_app


def signed_in(root: Path, *, trajectories: Path | None = None, base: str = "http://127.0.0.1") -> TestClient:
    """A visitor of these experiments who has opened the link. Pages that lead elsewhere are not followed."""
    access = Access()
    visitor = TestClient(create_app(Library(root, trajectories), access), base_url=base, follow_redirects=False)
    visitor.get(f"/?token={access.token}")
    return visitor


def start(root: Path) -> Viewer:
    viewer = Viewer(root=root, port=0)
    threading.Thread(target=viewer.serve, daemon=True).start()
    return viewer


SETTLED = """() => {
  const done = (id, ready) => !document.getElementById(id) || ready(document.getElementById(id));
  return document.readyState === "complete"
    && done("experiments", (table) => table.tBodies[0].rows.length)
    && done("overview", (page) => page.dataset.ready)
    && done("charts-page", () => document.querySelector(".chart canvas"))
    && done("tasks", () => document.getElementById("count").textContent)
    && done("task", (task) => task.dataset.ready)
    && done("candidates-page", (page) => page.dataset.ready)
    && done("differences-page", (page) => page.dataset.ready)
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
        page.on("console", lambda message: message.type == "error" and self._said(message.text))
        page.on("requestfailed", lambda request: self._failed(request.url, request.failure))
        page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _said(self, text: str) -> None:
        if "status of 409" not in text:  # a note that is refused: the page says why
            self.errors.append(text)

    def _failed(self, url: str, why: str | None) -> None:
        if "ERR_ABORTED" not in (why or ""):  # a page that was left while it loaded
            self.errors.append(f"{url}: {why}")
