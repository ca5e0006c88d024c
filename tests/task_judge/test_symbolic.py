"""math-verify in its own process: right answers, limits, threads; and the judge with and without it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.config import make_config
from ajet.schema.errors import MissingDependencyError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge import symbolic
from ajet.task_judge.base_judge import scored_by
from ajet.task_judge.math_answer_as_judge import MathAnswerAsJudge
from ajet.task_judge.symbolic import SymbolicCheck, symbolic_check

needs_library = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify")
TASK = WorkflowTask(task=Task(task_id="t", metadata={"answer": "x^2+2x+1"}), task_id="t")


def judged(judge: MathAnswerAsJudge, **metadata: str) -> tuple[float, bool]:
    return judge.compute_reward(TASK, WorkflowOutput(metadata=metadata))


@pytest.fixture(scope="module")
def check() -> Iterator[SymbolicCheck]:
    made = symbolic_check(True)
    assert made is not None
    yield made
    made.close()


@pytest.mark.slow
@needs_library
def test_expressions_from_several_threads(check: SymbolicCheck) -> None:
    questions = [("(x+1)^2", "x^2+2x+1", True), (r"\sqrt{8}", r"2\sqrt{2}", True), ("x^2", "2x", False)] * 4
    questions += [(r"\sqrt{2}", "1.41421356", False), (r"\frac{", "x", False), ("", "", False)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda question: check.same(*question[:2]), questions))
    assert found == [same for *_, same in questions]


@pytest.mark.slow
@needs_library
def test_what_takes_too_long_counts_as_different_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check = SymbolicCheck(limit_s=1.0, processes=1)
    assert check.same("x", "x")
    began = time.monotonic()
    for _ in range(2):
        assert not check.same("9^{9^{9^{9}}}", "9^{9^{9^{8}}}+x")
    assert time.monotonic() - began < 60
    assert check.same("x", "x"), "another child takes its place"
    assert sum("could not compare" in record.getMessage() for record in caplog.records) <= 1
    check.close()


@needs_library
def test_the_judge_asks_the_library_where_its_rules_end() -> None:
    judge = MathAnswerAsJudge(make_config())
    assert judged(judge, final_answer="(x+1)^2") == (1.0, True)
    assert judged(judge, final_answer="(x-1)^2") == (0.0, False)
    alone = MathAnswerAsJudge(make_config({"task_judge.math_verify": False}))
    assert judged(alone, final_answer="(x+1)^2") == (0.0, False)


def test_an_episode_that_ended_early_has_no_answer() -> None:
    judge = MathAnswerAsJudge(make_config({"task_judge.math_verify": False}))
    assert judged(judge, ended_early="max_steps", last_reply="x^2+2x+1") == (0.0, False)


def test_a_library_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    assert symbolic_check(None) is None
    with pytest.raises(MissingDependencyError, match=r"\[math\]"):
        symbolic_check(True)


def test_a_run_knows_what_scores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    math = "ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    alone = {"task_judge.judge_protocol": math, "task_judge.math_verify": False}
    parts = {"right": {"judge": math}, "short": {"judge": "my.py->Short"}}
    composite = {"task_judge.judge_type": "composite", "task_judge.parts": parts}
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    assert scored_by(make_config({"task_judge.judge_protocol": math})) == "MathAnswerAsJudge (exact rules alone)"
    assert scored_by(make_config(composite)) == "composite, MathAnswerAsJudge, Short (exact rules alone)"
    monkeypatch.setattr(symbolic, "find_spec", lambda name: name)
    monkeypatch.setattr(symbolic, "version", lambda name: "0.9.0")
    with_library = "MathAnswerAsJudge (exact rules, then math-verify 0.9.0)"
    assert scored_by(make_config({"task_judge.judge_protocol": math})) == with_library
    assert scored_by(make_config(alone)) == "MathAnswerAsJudge (exact rules alone)"
    assert scored_by(make_config()) == "the workflow itself"
    assert scored_by(make_config({"task_judge.judge_protocol": "my.py->Mine"})) == "Mine"


WORKFLOW = """
from ajet import Workflow, WorkflowOutput

class Answers(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1 + 1?"}])
        return WorkflowOutput(metadata={"final_answer": "2"})
"""
RUN = """
ajet:
  experiment_name: run
  model: {path: "tiny:qwen2-0.3m"}
  task_reader: {type: jsonl_dataset_file, jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}
  task_judge: {judge_protocol: "ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"}
  rollout: {user_workflow: answers.py->Answers, engine: scripted, scripted_replies: replies.json}
"""


def test_a_run_records_what_scored_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"question": "1 + 1?", "answer": "2"}
    files = {"answers.py": WORKFLOW, "run.yaml": RUN, "tasks.jsonl": json.dumps(task), "replies.json": '["2"]'}
    for name, text in files.items():
        Path(name).write_text(text)
    assert main(["--conf", "run.yaml", "--backbone=debug", "task_judge.math_verify=false"]) == 0
    recorded = json.loads(Path("saved_experiments/run-debug/environment.json").read_text())
    assert recorded["judge"] == "MathAnswerAsJudge (exact rules alone)"


def test_the_library_is_imported_in_the_child_only() -> None:
    code = (
        "import ajet.task_judge.math_answer_as_judge, sys; print('sympy' in sys.modules, 'math_verify' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2
