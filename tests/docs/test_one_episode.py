"""Every file and name that `docs/dev/one_episode.md` follows a task through exists, and so does the task."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "dev" / "one_episode.md"
NAMED = re.compile(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`")


def names_in(file: Path) -> set[str]:
    """What a module defines, and the methods of its classes."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            inside = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}.{inner.name}" for inner in inside)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize(("name", "file"), NAMED.findall(PAGE.read_text(encoding="utf-8")))
def test_the_name_is_in_the_file(name: str, file: str) -> None:
    assert name in names_in(ROOT / file)


def test_every_file_is_named_with_something_in_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:ajet|tutorial)/[\w/]+\.py)`", text))
    assert files == {file for _, file in NAMED.findall(text)}


def test_the_task_is_the_first_of_the_quickstart() -> None:
    task, *_ = blocks_of(PAGE)
    data = ROOT / "tutorial" / "example_math_agent" / "quickstart" / "data" / "train.jsonl"
    assert task.code.strip() == data.read_text().splitlines()[0]
