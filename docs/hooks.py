"""What MkDocs does besides reading `docs/`: the tutorials' READMEs, which live beside their code, are pages, too; and
`llms.txt` lists all pages, as plain Markdown beside the site, for programs that read it. The board is drawn from its
records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from ajet.observe.board import board_html
from ajet.observe.board_matrix import read_matrix

ROOT = Path(__file__).parents[1]
BOARD_HERE = "<!-- board -->"
_texts: dict[str, str] = {}
"""The pages' Markdown, by their place."""


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs."""
    for readme in sorted(ROOT.glob("tutorial/*/README.md")):
        files.append(File.generated(config, readme.relative_to(ROOT).as_posix(), abs_src_path=str(readme)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are on the site, whose root is `docs/`. A program isn't part of it: its name stays."""
    place = page.file.src_uri
    if place.startswith("tutorial/"):
        markdown = markdown.replace("](../../docs/", "](../../")
        markdown = re.sub(r"\[([^\]]+)\]\([^)]*\.py\)", r"\1", markdown)
    else:
        markdown = markdown.replace("](../tutorial/", "](tutorial/")
    _texts[place] = markdown
    if BOARD_HERE in markdown:
        folder = ROOT / "benchmarks" / "board"
        markdown = markdown.replace(BOARD_HERE, board_html(read_matrix(folder / "board.yaml"), folder / "records"))
    return markdown


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, with the pages in the order of the menu, and each page's Markdown."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in config["nav"]:
        (title, pages), *_ = section.items()
        lines += ["", f"## {title}", ""]
        lines += [_entry(page) for page in _pages_in(pages)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for place, text in _texts.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text, encoding="utf-8")


def _pages_in(part: Any) -> list[str]:
    """The pages of a part of the menu, which may have parts in it."""
    if isinstance(part, str):
        return [part]
    return [page for inner in (part.values() if isinstance(part, dict) else part) for page in _pages_in(inner)]


def _entry(place: str) -> str:
    """The page's title, address, and the first sentence that isn't in a picture, table or code block."""
    title, *paragraphs = re.sub(r"```.*?```", "", _texts[place], flags=re.DOTALL).split("\n\n")
    first = next((text.strip() for text in paragraphs if text.strip() and text.strip()[0] not in "#|!<-"), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("**", "")
    return f"- [{title.removeprefix('# ').strip()}]({place}): {re.split(r'(?<=[.!?:]) ', plain)[0].rstrip(':')}"
