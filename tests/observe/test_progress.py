"""What a run shows: live, plain, JSON, quiet."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, Group
from rich.text import Text

from ajet.observe import logs
from ajet.observe.logs import FileLog, level_from_environment, log_to_terminal
from ajet.observe.progress import PlainDisplay, Progress, ProgressMode
from ajet.observe.progress_live import LiveDisplay, StepTable, _ResizedRender, sparkline
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger, Run
from support import TESTS
from support.screen import Terminal


def episode(reward: float | None) -> Episode:
    failure = None if reward is not None else Failure("ValueError", "no such tool\nsecond line")
    status = EpisodeStatus.COMPLETED if reward is not None else EpisodeStatus.WORKFLOW_ERROR
    tree = CallTree(runs=[Run(np.arange(3, dtype=np.int32), -1, 0)])
    return Episode("e1", "t1", status, tree, Ledger(), reward=reward, failure=failure)


def run(mode: ProgressMode) -> str:
    stream = io.StringIO()
    with Progress.create(mode, stream) as progress:
        progress.start("math", "local", total_steps=10)
        progress.phase("load", detail="tiny, engine torch")
        progress.phase("rollout", 2)
        progress.episode(episode(1.0))
        progress.episode(episode(None))
        progress.phase("train")
        progress.step(
            1,
            {
                "return/mean": 0.25,
                "episode/failed_share": 0.5,
                "val/failed_share": 0.0,
                "train/loss": 0.00001234,
                "other": 1.0,
            },
        )
        progress.message("saved [checkpoint] step_1")
    return stream.getvalue()


def test_plain_lines() -> None:
    lines = run(ProgressMode.PLAIN).splitlines()
    assert lines[0] == "math (local, 10 steps)"
    assert lines[1] == "load: tiny, engine torch"
    assert lines[2].startswith("step 1/10  return 0.25  failed 50 %  loss 1.234e-05")
    assert lines[3] == "saved [checkpoint] step_1"


def test_json_lines() -> None:
    records = [json.loads(line) for line in run(ProgressMode.JSON).splitlines()]
    assert [record["event"] for record in records] == [
        "started", "phase", "phase", "episode", "episode", "phase", "step", "message",
    ]  # fmt: skip
    assert records[6]["metrics"]["other"] == 1.0 and records[4]["failure"]["kind"] == "ValueError"


def test_the_time_left_follows_from_the_steps_after_the_first() -> None:
    progress = Progress.create(ProgressMode.QUIET)
    progress.start("math", "local", total_steps=4)
    progress.step(0, {"val/return/mean": 0.5})  # Ray's of a validation before the first step, which is none itself
    progress.step(1, {"time/step": 90.0, "time/validate": 50.0})
    assert progress.state.eta_seconds is None
    progress.step(2, {"time/step": 30.0, "time/validate": 2.0})
    assert progress.state.eta_seconds == 2 * 32.0
    resumed = Progress.create(ProgressMode.QUIET)
    resumed.start("math", "local", total_steps=14, step=10)  # from another run's checkpoint
    for step in (11, 12):
        resumed.step(step, {"time/step": 30.0})
    assert resumed.state.eta_seconds == 2 * 30.0


@pytest.mark.parametrize("mode", [ProgressMode.LIVE, ProgressMode.PLAIN, ProgressMode.JSON])
def test_a_loss_that_is_no_number_is_shown(mode: ProgressMode) -> None:
    stream = io.StringIO()
    with Progress.create(mode, stream) as progress:
        progress.start("math", "local", total_steps=4)
        for step, loss in enumerate((1.0, 2.0, float("nan"), float("inf")), 1):
            progress.step(step, {"train/loss": loss})
    said = stream.getvalue()
    assert "nan" in said and "inf" in said
    assert "NaN" not in said and "Infinity" not in said, "neither is JSON"


def test_quiet_shows_nothing() -> None:
    assert run(ProgressMode.QUIET) == ""


def test_live_display_draws_and_shows_text_as_text() -> None:
    text = run(ProgressMode.LIVE)
    assert "math" in text and "saved [checkpoint] step_1" in text and "1/10" in text


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([1.0, 1.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0.0, float("nan"), float("-inf"), 1.0]) == "▁█" and sparkline([float("nan")]) == ""


def test_the_level_decides_what_the_terminal_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setenv("AJET_LOG_LEVEL", "warning")
    log_to_terminal()
    logger = logging.getLogger("ajet.test")
    logger.info("hidden")
    logger.error("judge failed")
    assert capsys.readouterr().err == "error: judge failed\n"
    monkeypatch.setenv("AJET_LOG_LEVEL", "nonsense")
    assert level_from_environment() == logging.INFO


def test_half_a_surrogate_pair_can_be_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A workflow's error may quote what a model wrote."""
    log_to_terminal()
    file = FileLog(tmp_path / "run.log")
    try:
        logging.getLogger("ajet.test").error("what is \ud800?")
    finally:
        file.close()
    assert capsys.readouterr().err == "error: what is \\ud800?\n"
    assert json.loads((tmp_path / "run.log").read_text())["message"] == "what is \ud800?"


def test_the_log_rotates_and_loses_none_of_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FILE_BYTES", 2000)
    monkeypatch.setattr(logs, "_FILES", 3)
    file = FileLog(tmp_path / "run.log")
    try:
        for index in range(200):
            logging.getLogger("ajet.test").info("line %d", index)
    finally:
        file.close()
    kept = sorted(tmp_path.iterdir(), reverse=True)
    assert [path.name for path in kept] == ["run.log.2", "run.log.1", "run.log"]
    assert all(path.stat().st_size <= 2000 for path in kept)
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines] == [f"line {index}" for index in range(200 - len(lines), 200)]


METRICS = {
    "return/mean": 0.123456, "success/rate": 0.5, "episode/turns": 2.0, "episode/reply_length": 123.4,
    "train/loss": -0.00001234, "train/kl": 0.02, "train/entropy": 1.5, "train/grad_norm": 12.5, "train/lr": 1e-6,
    "train/clip_fraction": 0.1, "episode/failed_share": 0.125, "perf/tokens_per_second": 1_234_567.0,
    "time/rollout": 3.2, "time/train": 1.1, "time/step": 4.3,
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits_and_its_columns_stand_below_each_other(width: int) -> None:
    table = StepTable()
    header, first = table.lines("1/60", METRICS, width)
    again, second = table.lines("2/60", {**METRICS, "val/return/mean": 0.75, "val/failed_share": 0.5}, width)
    assert not again
    assert all(len(line) <= width for line in (header, first, second))
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", header)]
    assert {match.end() for match in re.finditer(r"\S+", second)} == set(ends), (header, second)
    assert header.split()[:4] == ["step", "return", "success", "valid."]
    assert ("rollout s" in header) == (width == 200)
    assert ("0.123" in first and "-1.2e-05" in first) or width == 60


def test_the_header_comes_back_after_twenty_rows_and_when_the_terminal_changes() -> None:
    table = StepTable()
    headers = [bool(table.lines(str(step), METRICS, 80)[0]) for step in range(1, 42)]
    assert [step for step, shown in enumerate(headers, 1) if shown] == [1, 21, 41]
    assert table.lines("42", METRICS, 100)[0]
    assert table.lines("43", {**METRICS, "val/return/mean": 1.0}, 100)[0] == "", "validation had its column already"


def test_a_search_has_rounds_and_says_what_is_best_so_far() -> None:
    lines, panel = io.StringIO(), io.StringIO()
    for display in (PlainDisplay(lines), LiveDisplay(panel)):
        progress = Progress(display)
        with progress:
            progress.start("rooms", "prompt", total_steps=3, step=1, unit="round")
            progress.standing("c7 0.812 · left: 240 episodes")
            progress.step(2, {"return/mean": 0.5})
    assert lines.getvalue().splitlines()[0] == "rooms (prompt, 3 rounds, resumed after round 1)"
    assert "\nround 2/3  return 0.5" in lines.getvalue()
    shown = panel.getvalue()
    assert "    round" in shown and "rounds  " in shown and "best       c7 0.812 · left: 240 episodes" in shown
    assert "step" not in lines.getvalue() + shown


def test_a_narrow_panel_keeps_its_figures_and_tells_bars_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    panel = io.StringIO()
    with Progress(LiveDisplay(panel)) as progress:
        progress.start("math", "local", total_steps=80)
        for step in range(1, 61):
            progress.step(step, {"return/mean": step / 60})
    assert re.search("steps +━+─+  60/80 ", panel.getvalue())
    assert re.search("return +[▁-█]+  1\n", panel.getvalue())


@pytest.mark.parametrize("done", [0, 5])
def test_a_validation_is_told_of_its_own_step(capsys: pytest.CaptureFixture[str], done: int) -> None:
    """In a run that begins or goes on: of its start in a line of its own, of a step in that step's line."""
    validated = {"val/return/mean": 0.25}
    for mode in (ProgressMode.PLAIN, ProgressMode.JSON):
        with Progress.create(mode) as progress:
            progress.start("math", "local", total_steps=10, step=done)
            progress.validation(done, validated)
            progress.validation(done + 1, validated)
            progress.step(done + 1, {**METRICS, **validated})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "validation 0.25" in line] == [
        f"step {done}",
        f"step {done + 1}/10",
    ]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["step"] for event in events if event["event"] == "validation"] == [done, done + 1]


def test_a_workflow_that_closes_standard_output_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process puts another stream in its place (`ProcessState`); what follows is shown there."""
    for mode in (ProgressMode.PLAIN, ProgressMode.JSON):
        monkeypatch.setattr(sys, "stdout", closed := io.StringIO())
        with Progress.create(mode) as progress:
            progress.start("math", "local", total_steps=10)
            closed.close()
            monkeypatch.setattr(sys, "stdout", later := io.StringIO())
            progress.step(1, METRICS)
        assert later.getvalue().count("\n") == 1


PANEL = """
import sys, time
sys.path[:0] = [{tests!r}, {tests!r} + "/observe"]
from test_progress import METRICS, episode
from ajet.observe.progress import PlainDisplay, Progress, ProgressMode

with Progress.create(ProgressMode.AUTO) as progress:
    progress.start("math", "local", total_steps=10, viewer="ajet view math")
    progress.phase("load", detail="tiny:qwen2-0.3m, engine torch")
    time.sleep(0.4)
    progress.phase("validate", 4)
    progress.validation(0, {{"val/return/mean": 0.25}})
    for step in (1, 2, 3):
        progress.phase("rollout", 2)
        progress.episode(episode(1.0))
        progress.episode(episode(None))
        progress.phase("train")
        progress.step(step, METRICS)
    time.sleep(0.4)
    print("ready", flush=True)
    sys.stdin.readline()
    progress.message("saved [checkpoint] step_3")
    time.sleep(0.6)
"""


def panel(columns: int) -> Terminal:
    program = PANEL.format(tests=str(TESTS))
    return Terminal([sys.executable, "-c", program], columns=columns, rows=30)


@pytest.mark.parametrize("columns", [80, 200])
def test_the_panel_on_a_terminal(columns: int) -> None:
    with panel(columns) as terminal:
        terminal.wait_for("load       ")
        assert "tiny:qwen2-0.3m, engine torch" in terminal.text
        assert re.search("load +[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] tiny:", terminal.text), "how long it takes isn't known: it turns"
        shown = terminal.wait_for("ready")
        terminal.type("\n")
        shown = terminal.finish()
    assert shown.count("episodes  ") == 1, "one panel is left"
    assert "machine" not in shown and not re.search("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]|train  ", shown.partition("time  ")[0]), (
        "nothing goes on"
    )
    for row in ("steps  ", "return  ", "validation", "loss  ", "time  ", "episodes  ", "viewer     ajet view math"):
        assert row in shown, row
    assert "failed     3 × workflow_error, ValueError: no such tool" in shown
    assert "saved [checkpoint] step_3" in shown
    table = [line for line in shown.splitlines() if re.match(r"\s+(step|0|\d/10)\s", line)]
    assert [line.split()[0] for line in table if "step" not in line] == ["0", "1/10", "2/10", "3/10"]
    assert all(len(line) <= columns for line in shown.splitlines())
    assert ("rollout s" in shown) == (columns == 200)


@pytest.mark.parametrize("narrower", [40, 25])
def test_a_narrower_terminal_keeps_no_debris(narrower: int) -> None:
    """The rows that the terminal has made of wrapped lines are erased too."""
    lengths = [0, 14, 44, 37, 80, 19]
    render = _ResizedRender(Console(width=narrower), Text(""))
    assert render.position_cursor().segment.text == "", "nothing was drawn yet"
    console = Console(width=80, file=io.StringIO())
    list(console.render(_ResizedRender(console, Text(""))))
    wide = Group(*(Text("x" * length) for length in lengths))
    render.set_renderable(wide)
    list(render.__rich_console__(console, console.options))
    assert render.rows(80) == len(lengths)
    wanted = sum(max(1, -(-length // narrower)) for length in lengths)
    assert render.rows(narrower) == wanted
    assert render.position_cursor().segment.text.count("\x1b[1A") == wanted - 1
