"""`bp("TAG")` stops only where asked."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ajet.task_runner.breakpoints import ENVIRONMENT, bp, debugging, selected_tags, set_tags

PROGRAM = """
import threading
from ajet import bp

def work():
    secret = 41
    bp("HERE")
    print("went on with", secret)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def run(tags: str | None, typed: str, **more: str) -> str:
    environment = {**os.environ, **more}
    environment.pop(ENVIRONMENT, None)
    if tags is not None:
        environment[ENVIRONMENT] = tags
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    return subprocess.run(program, input=typed, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("tags", ["HERE", "OTHER|HERE", "all"])
def test_stops_at_the_callers_line_in_a_worker_thread(tags: str) -> None:
    printed = run(tags, "p secret + 1\nsecret = 7\ncontinue\n")
    assert "(Pdb) 42" in printed
    assert "went on with" in printed


@pytest.mark.parametrize("tags", [None, "", "OTHER"])
def test_passes_by_where_not_selected(tags: str | None) -> None:
    assert run(tags, "") == "went on with 41\n"


def test_the_users_own_debugger_is_asked() -> None:
    assert run("HERE", "", PYTHONBREAKPOINT="builtins.print").splitlines() == ["", "went on with 41"]


def test_set_tags(monkeypatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "x")
    set_tags("A, B|C")
    assert selected_tags() == {"A", "B", "C"}
    assert debugging()
    set_tags("")
    assert selected_tags() == frozenset()
    bp("A")


def test_a_trace_function_means_debugging(monkeypatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert not debugging()
    monkeypatch.setattr(sys, "gettrace", lambda: lambda *_: None)
    assert debugging()
