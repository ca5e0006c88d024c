"""What MkDocs does besides reading `docs/`: the tutorials' READMEs, which live beside their code, are pages, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


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
        return re.sub(r"\[([^\]]+)\]\([^)]*\.py\)", r"\1", markdown)
    return markdown.replace("](../tutorial/", "](tutorial/")
