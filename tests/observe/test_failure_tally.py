"""A failure is told with its line, once, and then counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ajet.observe.logs import FileLog, log_to_terminal
from ajet.observe.progress_state import FailureTally
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/agent.py", line 7, in execute\n    x\nKeyError: {}\n'


def failing(kind: str, message: str, status: EpisodeStatus = EpisodeStatus.WORKFLOW_ERROR) -> Episode:
    failure = Failure(kind, message, TRACEBACK.format(message))
    return Episode("e1", "t1", status, CallTree(), Ledger(), failure=failure)


def well() -> Episode:
    return Episode("e2", "t1", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=1.0)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    log_to_terminal()


def test_alike_failures_are_counted_together() -> None:
    tally = FailureTally()
    for number in range(44):
        tally.add(failing("KeyError", f"'city {number}'"))
    tally.add(failing("OSError", "no disk"))
    tally.add(well())
    tally.add(failing("EpisodeCancelled", "stopped", EpisodeStatus.CANCELLED))
    assert (tally.failures, tally.episodes) == (45, 46)
    assert tally.lines(1) == [
        "44 × workflow_error, KeyError: 'city 43', at /home/me/agent.py:7 in execute",
        "1 × other failures",
    ]


@pytest.mark.usefixtures("terminal")
def test_the_log_says_it_once_and_the_file_has_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FileLog(tmp_path / "run.log")
    try:
        tally = FailureTally()
        for _ in range(44):
            tally.add_and_log(failing("KeyError", "'city'"))
        tally.add_and_log(failing("OSError", "no disk"), only_to_file=True)
    finally:
        file.close()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: workflow_error in episode e1: KeyError: 'city', at /home/me/agent.py:7 in execute",
        "warning: workflow_error for the 10th time: KeyError: 'city', at /home/me/agent.py:7 in execute",
    ]
    records = [json.loads(line) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert len(records) == 3
    assert "line 7, in execute" in records[0]["traceback"]
    assert "OSError: no disk" in records[2]["message"]


@pytest.mark.usefixtures("terminal")
def test_the_same_warning_is_shown_once_and_then_counted(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ajet.test")
    for number in range(100):
        logger.warning("the same")
        logger.warning("reply %d is cut", number)
        logger.info("step %d", number)
        logger.error("broken")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "same" in line] == [
        "warning: the same",
        "warning: the same (10 such warnings so far)",
        "warning: the same (100 such warnings so far)",
    ]
    assert [line for line in said if "reply" in line] == [
        "warning: reply 0 is cut",
        "warning: reply 1 is cut",
        "warning: reply 2 is cut",
        "warning: reply 9 is cut (10 such warnings so far)",
        "warning: reply 99 is cut (100 such warnings so far)",
    ]
    assert len([line for line in said if line.startswith("step")]) == 100
    assert len([line for line in said if line == "error: broken"]) == 100


@pytest.mark.usefixtures("terminal")
def test_an_error_of_another_library_is_shown_once_and_then_counted(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(50):
        try:
            raise ValueError("no JSON")
        except ValueError:
            logging.getLogger("mcp.client.stdio").exception("Failed to parse a message")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("error")] == [
        "error: Failed to parse a message",
        "error: Failed to parse a message (10 such warnings so far)",
    ]
    assert said.count("ValueError: no JSON") == 2
