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

MAY_IMPORT: dict[str, set[str]] = {
    "schema": set(),
    "named_files": set(),
    "user_code": {"schema", "named_files"},
    "interpreter_host": {"schema"},
    "parent": set(),
    "forking": {"schema", "parent"},
    "child_process": set(),
    "json_schemas": {"child_process"},
    "json_schema_process": set(),
    "config": {"schema", "user_code", "named_files"},
    "attention_rules": set(),
    "four_bits": {"schema"},
    "http": {"schema"},
    "helper": {"schema", "config"},
    "sandbox": {"schema", "http"},
    "tools": {"schema", "user_code", "sandbox"},
    "agents": {"schema", "user_code", "named_files", "sandbox", "tools"},
    "compat": {
        "schema",
        "config",
        "context_tracker",
        "session",
        "tuner",
        "backbone",
        "agents",
        "tools",
        "tracing",
        "store",
        "workflow",
        "rollout_function",
        "trainer_api",
    },
    "environment": {"schema", "http", "user_code", "interpreter_host", "forking", "json_schemas"},
    "task_reader": {"schema", "config", "user_code", "named_files", "helper", "environment", "tracing"},
    "store": {"schema", "http"},
    "tracing": {"schema", "http"},
    "task_judge": {"schema", "config", "user_code", "helper", "interpreter_host", "sandbox", "agents"},
    "context_tracker": {"schema"},
    "engine": {"schema", "attention_rules", "four_bits", "http", "parent"},
    "session": {"schema", "context_tracker", "engine", "tracing", "json_schemas"},
    "gateway": {"schema", "session", "http", "tracing", "child_process"},
    "tuner": {"schema", "session", "gateway", "http", "helper", "agents", "tracing"},
    "workflow": {"schema", "tuner"},
    "rollout_function": {"schema", "workflow"},
    "task_runner": {
        "schema",
        "forking",
        "http",
        "store",
        "config",
        "tuner",
        "task_judge",
        "session",
        "gateway",
        "context_tracker",
        "user_code",
        "named_files",
        "workflow",
        "environment",
        "sandbox",
        "tools",
        "agents",
        "tracing",
    },
    "task_rollout": {"schema", "config", "helper", "task_runner", "task_reader"},
    "utils": {"schema", "helper", "tuner"},
    "credit": {"schema"},
    "prompt_tuning": {"schema"},
    "trainer": {"schema", "credit", "attention_rules", "four_bits"},
    "observe": {"schema", "user_code", "tracing", "http"},
    "runtime": {
        "schema",
        "http",
        "config",
        "user_code",
        "helper",
        "workflow",
        "context_tracker",
        "engine",
        "session",
        "gateway",
        "tuner",
        "task_judge",
        "task_runner",
        "task_rollout",
    },
    "viewer": {"schema", "observe", "http"},
}
"""Rooms (folders, or single modules) below `backbone` and `cli`, which may import everything."""

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


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_part_imports_only_what_stands_below_it(part: str) -> None:
    parts = MAY_IMPORT.keys() | {"backbone", "cli", "trainer_api"}
    wrong = [
        f"{path} imports {module}"
        for path, module in imports_of_part(part)
        if module.startswith("ajet.")
        and module.split(".")[1] in parts
        and module.split(".")[1] not in MAY_IMPORT[part] | {part}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_its_place_in_the_order() -> None:
    folders = {path.name for path in AJET.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders <= MAY_IMPORT.keys() | {"backbone", "cli"}


@pytest.mark.parametrize("part", LIGHT_PARTS)
def test_light_parts_name_no_heavy_library(part: str) -> None:
    wrong = [f"{path} imports {module}" for path, module in imports_of_part(part) if module.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


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
