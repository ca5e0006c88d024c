"""A program in another interpreter: what it writes, and how it ends, leaves nobody waiting."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError
from ajet.system.interpreter_host import InterpreterHost

PROGRAM = """
import json, os, sys, threading, time

answers = os.fdopen(int(sys.argv[1]), "w")

def tell(**answer):
    answers.write(json.dumps(answer) + chr(10))
    answers.flush()

tell(id="ready")
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "write":
        os.write(2, bytes([255, 10]))
        for _ in range(200):
            os.write(2, b"x" * 999 + b"\\n")
        os.write(2, b"end\\n")
    if request["do"] == "leave":
        threading.Thread(target=sys.stdin.read).start()  # its process stays, but answers no more
        answers.close()
        break
    tell(id=request["id"], value=request["do"])
"""


class Host(InterpreterHost):
    package = "nothing"
    fault = EnvironmentFault
    gone = EnvironmentUnavailableError


class Unread(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def write(self, text: str) -> int:
        if text == "end\n":
            self.ended.set()
        raise BrokenPipeError


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "program.py").write_text(PROGRAM)
    made = Host(tmp_path / "program.py", [], sys.executable, "key")
    made.started()
    yield made
    made.close()


def test_what_it_writes_need_be_no_text_and_find_no_reader(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Unread()
    monkeypatch.setattr(sys, "stderr", unread)
    assert host.ask("write")[1].result(30) == "write"
    assert unread.ended.wait(30)


def test_a_request_to_one_that_answers_no_more_fails(host: Host) -> None:
    for what in ("leave", "again", "again"):
        with pytest.raises(EnvironmentUnavailableError, match="the process of nothing has ended"):
            host.ask(what)[1].result(30)


def test_a_request_that_was_given_up_leaves_the_others_their_answers(host: Host) -> None:
    answers = [host.ask(f"{number}")[1] for number in range(200)]
    for answer in answers[::2]:
        answer.cancel()
    assert [answer.result(30) for answer in answers[1::2]] == [f"{number}" for number in range(1, 200, 2)]
