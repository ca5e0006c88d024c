"""What comes from elsewhere can't play tricks on a terminal: not in errors, not in the log."""

from __future__ import annotations

import io
import logging

import pytest

from ajet.cli.runs import print_table
from ajet.observe.logs import _HumanFormatter
from ajet.observe.progress import PlainDisplay
from ajet.schema.printable import encodable, printable
from ajet.system.command_line import fail

HOSTILE = "gone\x1b[2J\rok \u202etxt.exe\x9b1m"
SHOWN = r"gone\x1b[2J\x0dok \u202etxt.exe\x9b1m"


def test_only_what_plays_tricks_is_escaped() -> None:
    plain = "Grüße\n\t\u65e5\u672c\u8a9e \u0645\u0631\u062d\u0628\u0627 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert printable(plain) == plain, "a family of emoji is joined by U+200D"
    assert printable(HOSTILE) == SHOWN
    assert printable("\ud83d \U000e0041") == r"\ud83d \U000e0041"


def test_errors_and_log_lines_are_printable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert fail(HOSTILE) == 2
    assert capsys.readouterr().err == f"error: {SHOWN}\n"
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "runner w: %s", (HOSTILE,), None)
    assert _HumanFormatter().format(record) == f"warning: runner w: {SHOWN}"


def test_tables_and_progress_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name"], [["gone\x1b[2J"], ["txt\u202eexe"]])
    assert capsys.readouterr().out == "name\ngone\\x1b[2J\ntxt\\u202eexe\n"
    stream = io.StringIO()
    PlainDisplay(stream)._line("load: \x1b[2Jmodel\u202e")
    assert stream.getvalue() == "load: \\x1b[2Jmodel\\u202e\n"


def test_halves_of_surrogate_pairs_are_escaped_for_storing() -> None:
    assert encodable("plain é 日本") == "plain é 日本"
    assert encodable("a\ud800b") == "a\\ud800b"
