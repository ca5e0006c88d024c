"""`ajet tools`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajet.agents.tools import get_global_tool_registry
from ajet.cli.main import main


def test_it_lists_every_ready_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools"]) == 0
    printed = capsys.readouterr().out
    named = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert named == get_global_tool_registry().listed() and "    answer (string): The final answer" in printed


def test_it_prints_the_schemas_of_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text('def double(x: int) -> int:\n    """Double it."""\n    return 2 * x\n')
    assert main(["tools", "--json", "mine.py->double", "{finish: {name: done}}"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["function"]["description"] == "Double it." and second["function"]["name"] == "done"


@pytest.mark.parametrize("argument", ["calcuator", "{mcp", "missing.py->x", "{calculator: 5}"])
def test_what_is_wrong_is_a_message(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", argument]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_it_is_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["tools"]) == 0
    assert 50 < max(map(len, capsys.readouterr().out.splitlines())) <= 60
