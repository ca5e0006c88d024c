"""One page of the viewer as a picture: `python benchmarks/_viewer_picture.py FOLDER PAGE OUT.png [WxH] [dark]`.

`EPISODE` in a page's address is the experiment's first episode.

`make pictures` makes those of docs/viewer.md: most by the viewer's own tests, those of real runs by this.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from ajet.observe.episode_store import EpisodeFilter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.pages_of_viewer import settled, start


def shoot(folder: Path, page_path: str, out: Path, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
    """Open a page of the viewer over a folder of experiments, and save what it shows."""
    viewer = start(folder)
    if "EPISODE" in page_path:
        store = viewer.library.get(page_path.split("/")[2]).store()
        if store is None:
            raise SystemExit(f"{page_path}: the experiment has no episodes")
        rows, _ = store.page(EpisodeFilter(), descending=False, limit=1)
        page_path = page_path.replace("EPISODE", rows[0]["episode_id"])
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
        )  # fmt: skip
        base = f"http://127.0.0.1:{viewer.port}"
        context.add_cookies([{"name": viewer.access.cookie, "value": viewer.access.cookie_value, "url": base}])
        page = context.new_page()
        answer = page.goto(f"{base}{page_path}")
        if answer is None or not answer.ok:
            raise SystemExit(f"{page_path}: {answer.status if answer else 'no answer'}")
        settled(page)
        page.screenshot(path=str(out))
        browser.close()


def main(folder: str, page_path: str, out: str, size: str = "1280x800", scheme: str = "light") -> None:
    width, height = map(int, size.split("x"))
    shoot(Path(folder), page_path, Path(out), width, height, scheme)


if __name__ == "__main__":
    main(*sys.argv[1:])
