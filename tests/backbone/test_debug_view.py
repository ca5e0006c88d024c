"""How a debug run shows an episode."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet.backbone.debug import EpisodeView, JsonView, View
from ajet.schema.episode import Call, CallTree, Episode, EpisodeStatus, Failure, Fork, Ledger

USER = {"role": "user", "content": "Say hello"}
CALLING = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "content": "2"}
HOSTILE = {"role": "assistant", "content": "[bold]go[/bold] \x1b[31m\u202e"}


def call(name: str, turn: int, **fields: object) -> Call:
    return Call(name, "solver", "t", turn, 0, 3, run=0, **fields)  # type: ignore[arg-type]


def shown(capsys: pytest.CaptureFixture[str], *calls: Call, **fields: object) -> str:
    view = EpisodeView(1.0)
    view.started(1, 1)
    status = fields.pop("status", EpisodeStatus.COMPLETED)
    view.episode(Episode("e", "task-1", status, CallTree(calls=list(calls)), Ledger(), **fields), "Say hello")  # type: ignore[arg-type]
    view.close(Path("folder"))
    return capsys.readouterr().out


def test_turns_tool_calls_reward_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    first = call("c0", 0, new_messages=[USER], reply=CALLING)
    second = call("c1", 1, new_messages=[RESULT], reply=HOSTILE, extends=0)
    text = shown(capsys, first, second, reward=1.0)
    for expected in (
        "task task-1",
        "solver · turn 1",
        "(thinks) hm",
        '→ add({"a": 1})',
        "tool: 2",
        "solver · turn 2",
        r"[bold]go[/bold] \x1b[31m\u202e",
        "completed · reward 1 · 2 turns, 1 tool call",
        "1 episode, 0 without a reward. Recorded in folder",
    ):
        assert expected in text
    assert "\x1b[31m" not in text


@pytest.mark.parametrize("kind", [JsonView, lambda: EpisodeView(1.0)])
def test_episodes_are_shown_while_a_workflow_captures_standard_output(
    kind: Callable[[], View], capsys: pytest.CaptureFixture[str]
) -> None:
    view = kind()
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        view.episode(Episode("e", "task-1", EpisodeStatus.COMPLETED, CallTree(calls=[]), Ledger(), reward=1.0), "Say")
        view.close(Path("folder"))
    assert not captured.getvalue()
    said = capsys.readouterr().out
    assert "task-1" in said and "folder" in said


def test_an_id_made_from_the_content_fits_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = EpisodeView(1.0)
    view.started(1, 1)
    status = EpisodeStatus.WORKFLOW_ERROR
    view.episode(Episode("e", "task-43b77772246b", status, CallTree(calls=[]), Ledger()), "Say hello")
    view.close(Path("folder"))
    said = capsys.readouterr().out
    assert "\ntask-43b77772246b  workflow_error  " in said


def test_a_branch_is_shown_from_where_it_parts(capsys: pytest.CaptureFixture[str]) -> None:
    first = call("c0", 0, new_messages=[USER], reply=HOSTILE)
    other = {"role": "user", "content": "again"}
    branch = call("c1", 0, new_messages=[USER, HOSTILE, other], reply=HOSTILE, fork=Fork("reply_cut_by_length", 0))
    text = shown(capsys, first, branch, reward=0.0)
    assert text.count("user: Say hello") == 1
    assert "branch: reply_cut_by_length" in text and "user: again" in text


def test_a_conversation_of_a_thousand_turns(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call("c0", 0, new_messages=[USER], reply=CALLING)]
    calls += [call(f"c{turn}", turn, new_messages=[RESULT], reply=CALLING, extends=turn - 1) for turn in range(1, 1100)]
    assert "solver · turn 1100 (" in shown(capsys, *calls, reward=1.0)


def test_a_failure_with_the_users_lines(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("KeyError", "'x'", 'File "agent.py", line 3\n    boom()\n')
    text = shown(capsys, status=EpisodeStatus.WORKFLOW_ERROR, failure=failure)
    assert "workflow_error · no reward" in text
    assert "KeyError: 'x'" in text and "│     boom()" in text
