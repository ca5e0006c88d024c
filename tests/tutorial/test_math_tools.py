"""The math agent's tools stand up to what a model may write."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ajet.environment.sandboxes import SandboxError
from ajet.environment.sandboxes.bubblewrap_arguments import probe
from support.waiting import wait_until

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
FOLDER = Path(__file__).parents[2] / "tutorial" / "example_math_agent"


@pytest.fixture
def math_tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import math_tools

    return math_tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7-15", "69"), ("7/2", "3.5"), ("-(2+3)*4", "-20"), ("84/2", "42"), ("2**10 % 1000", "24"), (" 1 + 1 ", "2")],
)
def test_calculator_computes(math_tools: ModuleType, expression: str, value: str) -> None:
    assert math_tools.calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "__import__('os')", "1/0", "x", "", "(" * 5000, "True + 1", "'a' * 9", "10**60 * 10**60", "2 ** 0.5j"],
)
def test_calculator_answers_bad_input_with_an_error(math_tools: ModuleType, expression: str) -> None:
    assert math_tools.calculator(expression).startswith("error: ")


@pytest.mark.parametrize(("name", "arguments"), [("nothing", "{}"), ("calculator", "nope"), ("calculator", '{"x": 1}')])
def test_wrong_tool_call_is_answered(math_tools: ModuleType, name: str, arguments: str) -> None:
    assert math_tools.call_tool(name, arguments).startswith("error: ")


@needs_bubblewrap
def test_python_prints(math_tools: ModuleType) -> None:
    assert math_tools.run_python("print(6 * 7)") == "42"
    assert "exit code 3" in math_tools.run_python("raise SystemExit(3)")
    assert "print the result" in math_tools.run_python("6 * 7")


@needs_bubblewrap
def test_python_is_confined(math_tools: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "canary")
    assert "canary" not in math_tools.run_python("import os; print(dict(os.environ))")
    assert "FileNotFoundError" in math_tools.run_python("print(open('/etc/shadow').read())")
    assert "FileNotFoundError" in math_tools.run_python(f"print(open('{FOLDER}/data/train.jsonl').read())")
    assert "unreachable" in math_tools.run_python("import socket; socket.create_connection(('192.0.2.1', 80), 2)")
    assert "exit code" in math_tools.run_python("x = b'x' * 10**9; print('held')")
    assert "No space" in math_tools.run_python("open('f', 'wb').write(b'x' * 10**8)")
    assert len(math_tools.run_python("print('x' * 10**6)")) < 3000


def test_python_refuses_where_it_cannot_be_confined(
    math_tools: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        math_tools.run_python(f"open('{tmp_path}/ran', 'w')")
    assert not (tmp_path / "ran").exists()
    probe.cache_clear()


@needs_bubblewrap
@pytest.mark.slow
def test_python_is_stopped_with_all_it_started(math_tools: ModuleType) -> None:
    mark = f"95{time.monotonic_ns()}"
    child = f"os.setsid(); os.execvp('sleep', ['sleep', '{mark}'])"
    code = f"import os, time\nif os.fork() == 0:\n    {child}\ntime.sleep(99)"
    assert "stopped after" in math_tools.run_python(code)
    wait_until(lambda: not any(has(folder, mark) for folder in Path("/proc").glob("[0-9]*")), seconds=60)


def has(process: Path, mark: str) -> bool:
    try:
        return mark.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_shipped_data_is_what_the_generator_makes(tmp_path: Path) -> None:
    (tmp_path / "make_data.py").write_bytes((FOLDER / "make_data.py").read_bytes())
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    for split in ("train", "validation"):
        made = (tmp_path / "data" / f"{split}.jsonl").read_text()
        assert made == (FOLDER / "data" / f"{split}.jsonl").read_text()
        assert all(json.loads(line)["answer"].isdigit() for line in made.splitlines())
