"""A failure is told with its line, once, and then counted; what a run has taken so far, and will take in all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.local.placement import Placement
from ajet.cli.main import main
from ajet.observe.logs import FileLog, log_to_terminal
from ajet.observe.metrics import read_metrics
from ajet.observe.progress import Progress
from ajet.observe.progress_state import FailureTally, RunningTotal, cost_texts, time_text, total_text
from ajet.observe.viewer.library import Library
from ajet.observe.viewer.overview import overview
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger
from support.scripted_helper import USAGE, helper

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


BOTH = {"perf/total_steps": 10.0, "perf/gpus": 2.0}
ASKED = {"helper/tokens": 400.0, "helper/calls": 4.0}
LINES: list[dict[str, Any]] = [
    {"step": 0, "time/validate": 10.0, "val/episode/sampled_tokens_total": 50.0, **BOTH},
    {"step": 1, "time/step": 30.0, "episode/sampled_tokens_total": 100.0, **BOTH},
    {"step": 2, "time/step": 20.0, "episode/sampled_tokens_total": 100.0, **BOTH, **ASKED, "helper/cost": 0.5},
    {"step": 3, "time/step": 20.0, "time/validate": 10.0, "perf/gpus": 2.0, **ASKED},
]


def test_the_sums_and_what_is_expected() -> None:
    figures = RunningTotal.of(LINES).figures()
    assert figures == {
        "seconds": 90.0, "gpu_hours": pytest.approx(2 * 90 / 3600), "sampled_tokens": 250.0, "helper_calls": 8.0,
        "helper_tokens": 800.0, "helper_cost": 0.5, "expected_seconds": 90 + 7 * (90 - 40) / 2,
    }  # fmt: skip
    assert (
        total_text(figures) == "1 min 30 s of 4 min 25 s, 250 sampled tokens, 0.05 GPU hours, helper 800 tokens, 0.50"
    )
    assert "expected_seconds" not in RunningTotal.of(LINES[:2]).figures()  # one step tells nothing
    assert RunningTotal().figures() == {} and cost_texts({}) == [] and time_text({"seconds": 4.0}) == "4 s"
    done = RunningTotal.of([*LINES, *({"time/step": 20.0} for _ in range(7))])
    assert done.expected_seconds == done.seconds


def test_gpus_are_counted_once_each() -> None:
    assert [Placement(None, ()).gpus, Placement("cuda:0", (1, 2)).gpus, Placement("cuda:1", (0, 1)).gpus] == [1, 3, 2]


def test_the_terminal_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.create("plain") as progress:
        progress.start("run", "local", total_steps=10)
        progress.state.spent.add(LINES[0])
        for line in LINES[1:]:
            progress.step(line["step"], line)
    assert capsys.readouterr().out.splitlines()[-1].endswith("  0.05 GPU hours  helper 800 tokens, 0.50")
    with Progress.create("json") as progress:
        progress.start("run", "local", total_steps=10)
        progress.step(1, LINES[1])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["total"]["seconds"] == 30.0


CONFIG = """
ajet:
  experiment_name: judged
  model: {{path: "tiny:qwen2-0.3m"}}
  helper: {{model: m, base_url: "{url}", api_key: k, price_per_million: {{input: 1000, output: 2000}}}}
  task_reader: {{type: random_dummy, random_dummy: {{num_tasks: 8, num_validation_tasks: 2}}}}
  task_judge: {{judge_type: llm_judge, llm_judge: {{cache: false}}}}
  data: {{train_batch_size: 2, max_prompt_length: 256, max_response_length: 64}}
  rollout:
    agent: {{type: react, system_prompt: "Answer."}}
    num_repeat: 2
    max_model_len: 512
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  trainer_common: {{total_training_steps: 2, test_freq: 2, val_before_train: true, save_freq: 0, logger: [file]}}
"""


@pytest.mark.slow
def test_the_judges_questions_are_counted_and_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def grade(text: str) -> str:
        asked.append(text)
        return json.dumps({"score": len(asked) % 10})

    with helper(grade) as server:
        Path("run.yaml").write_text(CONFIG.format(url=server.url))
        assert main(["--conf", "run.yaml", "--quiet"]) == 0
    total = RunningTotal.of(read_metrics(Path("saved_experiments/judged/metrics.jsonl")))
    calls, price = len(asked), (USAGE["prompt_tokens"] * 1000 + USAGE["completion_tokens"] * 2000) / 1e6
    assert calls >= 8 and (total.helper_calls, total.helper_tokens) == (calls, calls * USAGE["total_tokens"])
    assert total.helper_cost == pytest.approx(calls * price)
    assert (total.steps, total.total_steps, total.gpu_hours) == (2, 2.0, 0.0) and total.sampled_tokens > 0
    shown = overview(Library(Path("saved_experiments")).get("judged"))["totals"]
    assert {name: shown[name] for name in total.figures()} == total.figures()
    capsys.readouterr()
    assert main(["runs"]) == 0
    said = f"helper {calls * USAGE['total_tokens']:,} tokens, {calls * price:.2f}"
    assert said in capsys.readouterr().out
