"""Who may import whom: a part never imports the one that conducts it, and light parts never load heavy libraries."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

AJET = Path(__file__).parent.parent / "ajet"

ROOMS = """
    schema config system observe store context_tracker engine gateway environment agents task_judge task_reader
    task_runner trainer prompt_tuning backbone cli compat
""".split()  # noqa: SIM905 - as one reads it
"""Folders of `ajet/`, from the ground up: each may import those before it."""

HEAVY = {
    "torch",
    "transformers",
    "ray",
    "vllm",
    "verl",
    "trinity",
    "agentscope",
    "langchain_core",
    "datasets",
    "starlette",
}
LIGHT_PARTS = ("schema", "config")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, except those for type checkers only."""
    source = path.read_text()
    gc.disable()  # CPython 3.11 loses count if it collects garbage meanwhile, and another thread parses something
    try:
        tree = ast.parse(source)
    finally:
        gc.enable()
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def imports_of_part(part: str) -> Iterator[tuple[Path, str]]:
    module = AJET / f"{part}.py"
    for path in [module] if module.is_file() else sorted((AJET / part).rglob("*.py")):
        for module in imports_of(path):
            yield path.relative_to(AJET.parent), module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_above_it_in_the_list(room: str) -> None:
    above = set(ROOMS[: ROOMS.index(room) + 1])
    wrong = [
        f"{path} imports {module}"
        for path, module in imports_of_part(room)
        if module.startswith("ajet.") and module.split(".")[1] not in above
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_its_place_in_the_list() -> None:
    folders = {path.name for path in AJET.iterdir() if path.is_dir() and not path.name.startswith("__")}
    modules = {path.stem for path in AJET.glob("*.py")}
    assert folders == set(ROOMS)
    assert modules == {"__init__", "__main__", "tuner", "workflow"}


@pytest.mark.parametrize("part", LIGHT_PARTS)
def test_light_parts_name_no_heavy_library(part: str) -> None:
    wrong = [f"{path} imports {module}" for path, module in imports_of_part(part) if module.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_tests_and_product_need_no_benchmark() -> None:
    benchmarks = {path.stem for path in (AJET.parent / "benchmarks").glob("*.py")} | {"benchmarks"}
    wrong = [
        f"{path.relative_to(AJET.parent)} imports {module}"
        for folder in (AJET, AJET.parent / "tests")
        for path in folder.rglob("*.py")
        for module in imports_of(path)
        if module.split(".")[0] in benchmarks
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("statement", ["import ajet", "import ajet.schema.episode"])
def test_import_loads_nothing_heavy(statement: str) -> None:
    program = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)
