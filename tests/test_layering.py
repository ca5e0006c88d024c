"""Who may import whom: a part never imports the one that conducts it, and light parts never load heavy libraries."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

AJET = Path(__file__).parent.parent / "ajet"

ROOMS = """
    schema config system observe store context_tracker engine gateway environment agents task_judge task_reader
    task_runner trainer prompt_tuning backbone cli compat
""".split()  # noqa: SIM905 - as one reads it
"""Folders of `ajet/`, from the ground up: each may import those before it."""

MOST_ARROWS = 80
"""Pairs of rooms of which one imports the other."""
FEWEST_LINES, MOST_LINES = 60, 450
SMALL_FOR_A_REASON = {
    "agents/tools/finish": "a kind of tool",
    "backbone/ray/verl/client": "needs verl, and the engine that it is for doesn't",
    "backbone/ray/verl/plugin": "runs in every process of verl's",
    "engine/vllm/in_worker/ajet_in_vllm": "loaded by vLLM, by name",
    "prompt_tuning/best_of": "a kind of optimiser",
    "schema/span": "a public contract",
    "task_judge/env_service_as_judge": "a kind of judge",
    "task_judge/symbolic_child": "a program of its own",
    "task_reader/env_service": "a kind of reader",
    "task_reader/random_dummy": "a kind of reader",
    "task_reader/verifiers_tasks": "a kind of reader",
    "task_runner/verifiers_workflow": "a workflow that YAML files name",
}
"""Modules below 60 lines, and why they are not part of another."""

OPENS = {
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "asyncio.start_server",
    "os.fork",
    "socket.create_connection",
    "socket.socketpair",
    "subprocess.Popen",
    "subprocess.run",
}
OPENS_ELSEWHERE = {
    "backbone/ray/start": "Ray's own processes, and whether its head answers",
    "backbone/ray/watcher": "the child that trains, with its log",
    "cli/bench": "runs ajet itself, once for each cell of a matrix",
    "cli/runner": "the user's program beside a runner",
    "cli/serve": "asks another interpreter what it has",
    "compat/agentjet": "runs the ajet command",
    "engine/vllm/server": "vLLM's servers, each a process group with its log",
    "environment/instances": "hands sockets to the processes that it forks",
    "environment/sandboxes/bubblewrap": "hands sockets and pipes into the sandbox",
    "environment/sandboxes/bubblewrap_arguments": "tries what bubblewrap may do here",
    "environment/sandboxes/container": "the container's own command line",
    "environment/sandboxes/forwarder": "the sandbox's only way out",
    "environment/sandboxes/inside": "the first process in a sandbox, with the standard library alone",
    "environment/sandboxes/unconfined": "commands as they are",
    "task_runner/processes": "hands sockets to the processes that it forks",
    "task_runner/tuner/clients": "a server that answers once, so that a fork finds its client imported",
}
"""Modules that start processes or open sockets without `system/`, and why."""

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


class Facts(NamedTuple):
    """What the rules ask of a file."""

    imports: tuple[str, ...]
    """Every module that it imports, except those for type checkers only."""
    named_imports: tuple[tuple[str, str], ...]
    """`from module import name`, those for type checkers included."""
    classes: tuple[str, ...]
    """Those at its top."""
    opens: bool
    """Whether it starts a process or opens a socket."""


@cache
def facts_of(path: Path) -> Facts:
    gc.disable()  # CPython 3.11 loses count if it collects garbage meanwhile, and another thread parses something
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    nodes = list(ast.walk(tree))
    typing_only = {
        node
        for block in nodes
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    plain = [node for node in nodes if isinstance(node, ast.Import) and node not in typing_only]
    return Facts(
        imports=(
            *(alias.name for node in plain for alias in node.names),
            *(str(node.module) for node in froms if node.level == 0 and node not in typing_only),
        ),
        named_imports=tuple((str(node.module), alias.name) for node in froms for alias in node.names),
        classes=tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        opens=any(isinstance(node, ast.Call) and ast.unparse(node.func) in OPENS for node in nodes),
    )


def imports_of(path: Path) -> tuple[str, ...]:
    return facts_of(path).imports


def imports_of_part(part: str) -> Iterator[tuple[Path, str]]:
    alone = AJET / f"{part}.py"
    for path in [alone] if alone.is_file() else sorted((AJET / part).rglob("*.py")):
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


def test_few_rooms_import_each_other() -> None:
    found = {
        (room, module.split(".")[1])
        for room in ROOMS
        for _, module in imports_of_part(room)
        if module.startswith("ajet.")
    }
    assert len({(room, other) for room, other in found if other in ROOMS and other != room}) <= MOST_ARROWS


def test_every_room_has_its_place_in_the_list() -> None:
    folders = {path.name for path in AJET.iterdir() if path.is_dir() and not path.name.startswith("__")}
    modules = {path.stem for path in AJET.glob("*.py")}
    assert folders == set(ROOMS)
    assert modules == {"__init__", "__main__", "tuner", "workflow"}


def modules() -> Iterator[Path]:
    """Every module of ours. Templates are what `ajet init` copies, not modules."""
    yield from (path for path in sorted(AJET.rglob("*.py")) if "_template" not in str(path))


def outside_compat() -> Iterator[Path]:
    yield from (path for path in modules() if path.relative_to(AJET).parts[0] != "compat")


def named(path: Path) -> str:
    return path.relative_to(AJET).with_suffix("").as_posix()


def test_nobody_imports_deeper_than_a_room_s_modules() -> None:
    wrong = [
        f"{named(path)} imports {module}"
        for path in modules()
        for module in imports_of(path)
        if module.startswith("ajet.")
        and module.count(".") > 2
        and module.split(".")[1] not in ("compat", path.relative_to(AJET).parts[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_have_a_readable_size() -> None:
    sizes = {named(path): len(path.read_text().splitlines()) for path in modules()}
    too_long = {name: size for name, size in sizes.items() if size > MOST_LINES}
    assert not too_long, f"above {MOST_LINES} lines: {too_long}"
    small = {
        named(path)
        for path in outside_compat()
        if sizes[named(path)] < FEWEST_LINES and path.stem not in ("__init__", "__main__") and path.parent != AJET
    }
    assert small == set(SMALL_FOR_A_REASON), "a module below 60 lines joins the one that uses it, or is listed here"


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in outside_compat():
        for name in facts_of(path).classes:
            homes.setdefault(name, []).append(named(path))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_only_system_starts_processes_and_opens_sockets() -> None:
    found = {named(path) for path in modules() if facts_of(path).opens and "system" not in path.parts}
    assert found == set(OPENS_ELSEWHERE)


def import_circles() -> list[set[str]]:
    """Modules that import each other, imports for type checkers and those inside functions included."""
    names = {
        ".".join(path.relative_to(AJET.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
    }
    imports = {name: set[str]() for name in names}
    for name, path in names.items():
        for module, what in facts_of(path).named_imports:
            whole = f"{module}.{what}"
            imports[name] |= {whole if whole in names else module} & names.keys() - {name}
    reached = {name: _reached(name, imports) for name in names}
    return [{name, other} for name in names for other in reached[name] if name < other and name in reached[other]]


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for further in imports[waiting.pop()] - seen:
            seen.add(further)
            waiting.append(further)
    return seen


def test_no_modules_import_each_other() -> None:
    assert not import_circles()


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
