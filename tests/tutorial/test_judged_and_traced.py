"""The examples of rubrics and of traces: their rules, debug and two steps of training, offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.observe.metrics import read_metrics
from ajet.task_judge.rubrics import POINTWISE
from support.ports import free_port
from support.tutorial_runs import ROOT, TINY, TUTORIAL, debug, imports, train

RUBRICS = "example_rubrics_judge/rubrics_judge.yaml"
TRACING = "example_feedback_tracing/feedback_tracing.yaml"


def traces(folder: Path) -> list[str]:
    """The settings for traces that the example's own script wrote."""
    script = TUTORIAL / "example_feedback_tracing" / "make_traces.py"
    subprocess.run([sys.executable, str(script), str(folder / "studio.sqlite3")], check=True)
    return [f"task_reader.feedback_tracing.base_url={folder}/studio.sqlite3"]


def test_the_rules_grade_by_what_the_rubrics_ask_for() -> None:
    with imports("example_rubrics_judge"):
        import rule_grader

        def score(answer: str, rubrics: str, query: str = "Where is order 47?") -> float:
            asked = POINTWISE.format(query=query, rubrics=rubrics, answer=answer)
            return float(json.loads(rule_grader.answer(asked))["score"])

        both = rule_grader.NAMED + rule_grader.SORRY
        examples = (TUTORIAL / "example_rubrics_judge/data/graded.jsonl").read_text().splitlines()
        for one in map(json.loads, examples):
            assert score(one["answer"], both, one["main_query"]) == one["score"], one
        assert score("Order 47. Sorry!", rule_grader.SORRY) == 0.4 and score("Order 47. Sorry!", "- Be brief.") == 0.0
        assert score("Order 48, 47", both) == 0.0, "which of them?"
        with pytest.raises(rule_grader.Unanswerable):
            rule_grader.answer("Who are you?")


@pytest.mark.slow
def test_rubrics_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RULE_GRADER_PORT", str(free_port()))
    monkeypatch.chdir(ROOT)
    assert main(["rubrics", "make", f"tutorial/{RUBRICS}", "--exp-dir", str(tmp_path), TINY]) == 0
    said = capfd.readouterr()
    assert "name the customer's order" in said.out and "started grader" not in said.out and "started grader" in said.err
    assert (tmp_path / "rubrics_judge" / "cache" / "rubrics.yaml").is_file()
    assert all(0 <= (episode.reward or 0.0) <= 1 for episode in debug(monkeypatch, RUBRICS, tmp_path / "debug"))
    steps = train(monkeypatch, RUBRICS, tmp_path / "train", "rollout.temperature=1.5")
    assert all(0 <= step["reward/mean"] <= 1 for step in steps)
    assert all(step.get("status/completed", 0) + step.get("status/truncated", 0) == 4 for step in steps)


@pytest.mark.slow
def test_feedback_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RULE_REVIEWER_PORT", str(free_port()))
    monkeypatch.chdir(ROOT)
    given, out = [*traces(tmp_path), TINY], tmp_path / "traced.jsonl"
    command = ["tasks", "generate", f"tutorial/{TRACING}", "--out", str(out), "--exp-dir", str(tmp_path)]
    assert main([*command, *given]) == 0
    both = out.read_text() + out.with_name("traced_validation.jsonl").read_text()
    assert len(both.splitlines()) == 81 and "can't say" not in both, "one trace in ten is of no use"
    assert "started reviewer" not in capfd.readouterr().out
    debug(monkeypatch, TRACING, tmp_path / "debug", *given)
    train(monkeypatch, TRACING, tmp_path / "train", *given)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["rubrics_judge", "feedback_tracing"])
def test_the_cold_start_trains_on_its_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.chdir(ROOT)
    given = ["trainer_common.total_training_steps=2"]
    if example == "feedback_tracing":
        given += [*traces(tmp_path), f"trainer_common.algorithm.sft.demonstrations={tmp_path}/conversations.jsonl"]
    conf = f"tutorial/example_{example}/cold_start.yaml"
    assert main(["--conf", conf, "--exp-dir", str(tmp_path), *given]) == 0
    assert len(read_metrics(tmp_path / f"{example}_cold_start" / "metrics.jsonl")) == 2
