"""Tools by name, and tools from a YAML's list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.agents.tools import (
    FunctionTool,
    Toolset,
    ToolSetupError,
    get_global_tool_registry,
    make_tools,
    register_tool,
    tool,
)
from ajet.agents.tools.calculator import Calculator


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    registry = get_global_tool_registry()
    before = registry.names()
    yield
    for name in set(registry.names()) - set(before):
        registry.unregister(name)


@tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


USER_FILE = '''
from ajet.agents.tools import StatelessTool, ToolResult, tool

def double(x: int) -> int:
    """Double it."""
    return 2 * x

class Scaler(StatelessTool):
    name = "scaler"
    description = "Scale."
    parameters = {"type": "object"}
    def __init__(self, factor: int = 2):
        self.factor = factor
    async def run(self, arguments, context):
        return ToolResult(str(self.factor))

both = [double, Scaler(3)]

def make(n: int):
    return Scaler(n)

nonsense = 5
'''


def names(specs: list[Any], base: Path | None = None) -> list[str]:
    return [getattr(each, "name", "?") for each in make_tools(specs, [base] if base else [])]


def test_ready_tools_have_names() -> None:
    assert names(["calculator", {"finish": {}}, {"finish": {"name": "done"}}]) == ["calculator", "finish", "done"]


def test_registered_tools_are_found_under_the_name_that_the_model_sees() -> None:
    register_tool(shout)
    register_tool(shout, name="loud")
    made = make_tools(["shout", "loud"])
    assert [each.name for each in made] == ["shout", "loud"]  # type: ignore[union-attr]

    async def call() -> str:
        async with Toolset(made) as toolset:
            return (await toolset.call("loud", {"text": "a"})).output

    assert asyncio.run(call()) == "A"


def test_functions_can_be_registered_as_they_are() -> None:
    def whisper(text: str) -> str:
        """Whisper."""
        return text.lower()

    register_tool(whisper)
    assert isinstance(make_tools(["whisper"])[0], FunctionTool)


def test_a_name_is_given_once() -> None:
    register_tool(shout)
    register_tool(shout)
    with pytest.raises(ToolSetupError, match="there is a tool 'shout' already"):
        register_tool(tool(name="shout")(lambda: None) if False else Calculator(), name="shout")
    with pytest.raises(ToolSetupError, match="there is a tool 'calculator' already"):
        register_tool(Calculator())


def test_users_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    assert names(["mine.py->double", {"mine.py->make": {"n": 4}}], tmp_path) == ["double", "scaler"]
    (scaler,) = make_tools([{"mine.py->Scaler": {"factor": 9}}], [tmp_path])
    assert scaler.factor == 9  # type: ignore[union-attr]
    assert names(["mine.py->both"], tmp_path) == ["double", "scaler"]


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        (["calcuator"], r"tools\[0\]: no tool 'calcuator'; did you mean 'calculator'"),
        (["finish", 5], r"tools\[1\]: 5 is not a tool"),
        ([{"calculator": {}, "finish": {}}], "expected one name"),
        ([{"calculator": {"digits": 5}}], "calculator has no option 'digits'; options: name"),
        ([{"calculator": 5}], "must be a mapping"),
        ([{"mine.py->Scaler": {"factor": "x"}}], "factor: Input should be a valid integer"),
        (["mine.py->nonsense"], "5 is not a tool"),
        (["mine.py->Missing"], "has no 'Missing'"),
        ([{"mine.py->both": {"a": 1}}], "takes no options"),
        (["finish", "finish"], "two tools are called 'finish'"),
        ("calculator", "tools must be a list"),
        ({"calculator": {}}, "tools must be a list"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, specs: Any, said: str) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    with pytest.raises(ToolSetupError, match=said):
        make_tools(specs, [tmp_path])
