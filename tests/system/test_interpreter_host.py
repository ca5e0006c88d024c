"""A program in another interpreter: its output, its answers and its end are taken as they come."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError
from ajet.system.interpreter_host import InterpreterHost

PROGRAM = """
import json, os, sys, time

answers = os.fdopen(int(sys.argv[1]), "w")

def tell(**answer):
    print(json.dumps(answer), file=answers, flush=True)

tell(id="ready", value=None)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "write":
        sys.stderr.buffer.write(b"\\xff and more\\n" * 50_000)
        sys.stderr.flush()
    if request["do"] == "leave":
        answers.close()
        time.sleep(600)
    tell(id=request["id"], value=request["do"])
"""


class Host(InterpreterHost):
    package = "a package"
    fault = EnvironmentFault
    gone = EnvironmentUnavailableError


@contextmanager
def host_of(folder: Path) -> Iterator[Host]:
    (folder / "program.py").write_text(PROGRAM)
    host = Host(folder / "program.py", [], sys.executable, "a.key")
    try:
        host.started()
        yield host
    finally:
        host.close()
        for thread in threading.enumerate():
            if thread.name.startswith(Host.package):  # it passes output on: to a file that the test is about to close
                thread.join(30)


def test_output_that_is_no_text_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with host_of(tmp_path) as host:
        assert host.ask("write")[1].result(30) == "write"
    assert "\ufffd and more" in capfd.readouterr().err


def test_output_that_nobody_takes_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    with host_of(tmp_path) as host:
        assert host.ask("write")[1].result(30) == "write"


def test_who_asks_a_program_that_is_leaving_is_told(tmp_path: Path) -> None:
    with host_of(tmp_path) as host:
        leaving = host.ask("leave")[1]
        with pytest.raises(EnvironmentUnavailableError):
            leaving.result(30)
        with pytest.raises(EnvironmentUnavailableError):
            host.ask("anything")[1].result(10)


def test_an_answer_to_a_request_that_is_being_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled between a look at it and its answer."""

    class Cancelled(Future[Any]):
        def cancelled(self) -> bool:
            return super().cancelled() or not self.cancel()

    with host_of(tmp_path) as host:
        monkeypatch.setattr("ajet.system.interpreter_host.Future", Cancelled)
        host.ask("this")
        monkeypatch.undo()
        assert host.ask("that")[1].result(10) == "that"


class SharedHost(Host):
    def __init__(self, program: str) -> None:
        super().__init__(Path(program), [], sys.executable, "a.key")

    def ready(self) -> None:
        self.started()


def test_one_is_shared_until_it_ends(tmp_path: Path) -> None:
    program, other = tmp_path / "program.py", tmp_path / "other.py"
    program.write_text(PROGRAM)
    other.write_text(PROGRAM)
    first = SharedHost.shared(str(program))
    assert SharedHost.shared(str(program)) is first
    second = SharedHost.shared(str(other))
    first.close()
    third = SharedHost.shared(str(program))
    assert third is not first and second is not first
    for host in (second, third):
        assert host.ask("go")[1].result(30) == "go"
        host.close()
