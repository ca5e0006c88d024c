"""A viewer over a made-up experiment, and a real Chromium to look at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ajet.observe.viewer.serve import Viewer
from support.chromium import chromium
from support.pages_of_viewer import Watched, start
from support.synthetic_run import write_experiment

expect.set_options(timeout=30_000)  # a busy machine is no failure


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs."""
    root = tmp_path_factory.mktemp("experiments")
    write_experiment(root, "math-agent", steps=20, tasks=3, seed=0)
    write_experiment(root, "math-agent-rloo", steps=12, tasks=2, seed=1)
    return root


@pytest.fixture(scope="session")
def viewer(experiments: Path) -> Viewer:
    return start(experiments)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: other tests of this process need event loops."""
    with chromium() as browser:
        yield browser


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
