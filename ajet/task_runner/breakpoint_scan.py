"""Breakpoints in the user's sources, found without running them: tags of `bp("TAG")`, and lines with `breakpoint()`."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_FILES = 2000
"""More files than this are somebody's home directory, not a project."""
_NO_SOURCES = frozenset({"node_modules", "saved_experiments", "site-packages", "__pycache__"})
_NOT_OURS = frozenset({"pyvenv.cfg", "config.resolved.yaml"})
"""Files that mark a virtual environment, and an experiment's folder with its copies of the sources."""
_WORTH_PARSING = re.compile(r"\b(?:bp|breakpoint|set_trace)\s*\(")
_STOPS = frozenset({"breakpoint", "set_trace"})


@dataclass(slots=True)
class FoundBreakpoints:
    """What is in the sources."""

    tags: set[str] = field(default_factory=set)
    """Of `bp("TAG")`."""
    stops: list[str] = field(default_factory=list)
    """`agent.py:12` for each `breakpoint()` or `pdb.set_trace()`."""
    complete: bool = True
    """Every tag is known: no tag is computed when the program runs, and no file was left out."""


def find_breakpoints(folders: Sequence[Path]) -> FoundBreakpoints:
    """Look through the Python files in these folders and below."""
    found = FoundBreakpoints()
    for number, file in enumerate(_sources(folders)):
        if number >= _FILES:
            found.complete = False
            break
        _look_into(file, found)
    return found


def _sources(folders: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for here, below, names in os.walk(folder):
            if not _NOT_OURS.isdisjoint(names):
                below.clear()
                continue
            below[:] = [name for name in below if not name.startswith(".") and name not in _NO_SOURCES]
            for name in names:
                file = (Path(here) / name).resolve()
                if name.endswith(".py") and file not in seen:
                    seen.add(file)
                    yield file


def _look_into(file: Path, found: FoundBreakpoints) -> None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text) if _WORTH_PARSING.search(text) else None
    except (OSError, SyntaxError, ValueError):  # importing it will say what is wrong, if the run does
        found.complete = False
        return
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _STOPS:
            found.stops.append(f"{_shown(file)}:{node.lineno}")
        elif name == "bp":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            tag = given[0] if given else ast.Constant("all")
            if isinstance(tag, ast.Constant) and isinstance(tag.value, str):
                found.tags.add(tag.value)
            else:
                found.complete = False


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
