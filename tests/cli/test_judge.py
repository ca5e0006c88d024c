"""`ajet judge`: a judge beside scores that somebody trusts."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from ajet.cli.judge import Scored, agreement, judge_rows
from ajet.cli.main import main
from ajet.config import make_config
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, GroupJudge, JudgedEpisode, Later
from support.scripted_helper import helper

PAGE = (Path(__file__).parents[2] / "docs/judges.md").read_text().split("## Is the judge right?")[1].split("\n## ")[0]
ROWS = [
    {"question": "What is 17 × 3?", "answer": "51", "reply": "17 × 3 = 51", "score": 1},
    {"question": "What is 2 × 3?", "answer": "6", "reply": "It is 5.", "score": 0},
    {"question": "What is 5 × 5?", "answer": "25", "reply": "25", "score": 1},
    {"question": "What is 4 × 4?", "answer": "16", "reply": "sixteen", "score": 1},
    {"question": "What is 1 × 1?", "answer": "1", "reply": "\\boxed{2}", "score": 0},
    {"question": "What is 9 × 9?", "reply": "81", "score": 1},
]
MATHS = "ajet: {task_judge: {judge_protocol: ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge}}\n"


def write(rows: list[dict[str, Any]], conf: str = MATHS) -> None:
    Path("scored.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("my_agent.yaml").write_text(conf)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_report_is_the_one_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    write(ROWS)
    assert json.loads(PAGE.split("```json\n")[1].split("```")[0]) == ROWS[0]
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in PAGE


def test_the_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    write(ROWS)
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["judged"], found["bias"]) == (6, 5, pytest.approx(-0.2))
    assert found["equal"]["value"] == pytest.approx(0.8)
    assert found["worst"][0] == {"task": "What is 4 × 4?", "reply": "sixteen", "score": 1.0, "judged": 0.0}
    (error,) = found["errors"]
    assert error["task"] == "What is 9 × 9?" and "needs 'answer'" in error["why"]


def test_the_intervals() -> None:
    given, judged = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.1, 0.1, 0.5, 0.5, 0.9, 1.0]
    rows = [Scored(Task(), "", score, gave) for score, gave in zip(given, judged, strict=True)]
    found = agreement([*rows, Scored(Task(), "", 1.0, None, "no")])
    mean = sum(judged) / 6
    r = sum((a - 0.5) * (b - mean) for a, b in zip(given, judged, strict=True)) / math.sqrt(
        sum((a - 0.5) ** 2 for a in given) * sum((b - mean) ** 2 for b in judged)
    )
    low, high = (math.tanh(math.atanh(r) + sign * 1.96 / math.sqrt(3)) for sign in (-1, 1))
    assert found.correlation == (pytest.approx(r), pytest.approx(low), pytest.approx(high))
    assert (found.judged, found.bias) == (6, pytest.approx(mean - 0.5))
    differences = [gave - score for score, gave in zip(given, judged, strict=True)]
    assert found.bias_error == pytest.approx(2.57058 * stdev(differences) / math.sqrt(6), rel=1e-4)
    assert agreement(rows[:1]).bias_error is None
    assert agreement(rows[:3]).correlation is None
    same = [Scored(Task(), "", score, score) for score in given]
    assert agreement(same).correlation == (1.0, 1.0, 1.0) and agreement(same).equal.value == 1.0


def test_a_model_that_grades(capsys: pytest.CaptureFixture[str]) -> None:
    with helper(lambda asked: '{"score": 10}' if "sixteen" in asked else '{"score": 5}') as server:
        at = f"helper: {{model: m, base_url: '{server.url}', api_key: k}}"
        write(ROWS, f"ajet: {{{at}, task_judge: {{judge_type: llm_judge}}}}\n")
        assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "judged         6 of 6 rows" in said and "given 0, judged 0.5: What is 2 × 3? → It is 5." in said


@pytest.mark.parametrize(
    "command", [["judge", "my_agent.yaml", "--scores", "scored.jsonl"], ["rubrics", "make", "my_agent.yaml"]]
)
def test_a_model_that_does_not_answer(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet.task_judge.helper.MAX_RETRIES", 0)
    examples = "rubrics_auto_grader: {jsonl_dataset_file: {training: {file_path: examples.jsonl}}}"
    judge = f"task_judge: {{judge_type: rubrics_auto_grader, {examples}}}"
    write(ROWS, f"ajet: {{helper: {{model: m, base_url: 'http://127.0.0.1:9/v1', api_key: k}}, {judge}}}\n")
    Path("examples.jsonl").write_text('{"main_query": "a", "final_answer": "b", "score": 1}\n')
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("error: helper model 'm' at http://127.0.0.1:9/v1: ")


def test_a_file_with_a_byte_order_mark(capsys: pytest.CaptureFixture[str]) -> None:
    write(ROWS)
    scores = Path("scored.jsonl")
    scores.write_text(scores.read_text(), encoding="utf-8-sig")
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 0


def test_what_is_wrong_with_the_input(capsys: pytest.CaptureFixture[str]) -> None:
    for row, said in (
        ({"question": "?", "reply": 4, "score": 1}, "scored.jsonl:1: `reply` should be a text, not 4"),
        ({"question": "?", "reply": "4", "score": "good"}, "scored.jsonl:1: `score` should be a number, not 'good'"),
        ({"question": "?", "reply": "4", "score": 10**400}, "scored.jsonl:1: int too large"),
        ({"text": "?", "reply": "4", "score": 1}, "scored.jsonl:1: no field main_query"),
    ):
        write([row])
        assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 2
        assert said in capsys.readouterr().err
    write([])
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 2
    assert "holds no rows" in capsys.readouterr().err
    write(ROWS, "ajet: {}\n")
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 2
    assert "the config has no judge: set ajet.task_judge.judge_type" in capsys.readouterr().err
    write([ROWS[-1]])
    assert main(["judge", "my_agent.yaml", "--scores", "scored.jsonl"]) == 1
    assert "the judge gave no score: JudgeFault" in capsys.readouterr().err


def test_a_judge_may_decide_at_once_about_some_rows() -> None:
    class Sometimes(GroupJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return Later() if workflow_output.metadata["final_answer"] else 0.0

        def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> Any:
            return [float(each.last_reply) for each in episodes]

    rows = [Scored(Task(main_query="q"), reply, 0.0) for reply in ("2", "", "3")]
    judge_rows(Sometimes(make_config()), rows)
    assert [(row.judged, row.why) for row in rows] == [(2.0, ""), (0.0, ""), (3.0, "")]


def test_rows_are_compared_with_those_of_their_task() -> None:
    class Counts(GroupJudge):
        def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> Any:
            return [len(episodes)] * len(episodes)

    tasks = [Task(main_query="Play.", metadata={"answer": answer}) for answer in ("a", "b", "b")]
    tasks += [Task(main_query=query, task_id="t", metadata={"rater": query}) for query in "xy"]
    rows = [Scored(task, "reply", 0.0) for task in tasks]
    judge_rows(Counts(make_config()), rows)
    assert [row.judged for row in rows] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_a_plain_judge_may_start_an_event_loop() -> None:
    class Loops(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return asyncio.run(asyncio.sleep(0, 0.5))

    rows = [Scored(Task(main_query="q"), "1", 0.0)]
    judge_rows(Loops(make_config()), rows)
    assert (rows[0].judged, rows[0].why) == (0.5, "")


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_judge_that_hangs() -> None:
    write(ROWS, "ajet: {task_judge: {judge_protocol: hangs.py->Hangs}}\n")
    Path("hangs.py").write_text(
        "import os, time\nfrom ajet.task_judge.base_judge import BaseJudge\n\n"
        "class Hangs(BaseJudge):\n"
        "    def compute_reward(self, task, output):\n"
        "        os.write(1, b'asked\\n')  # as one line: all rows are judged at once\n"
        "        time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "ajet", "judge", "my_agent.yaml", "--scores", "scored.jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as judging:
        try:
            assert judging.stdout is not None and judging.stdout.readline() == "asked\n"
            judging.send_signal(signal.SIGINT)
            assert judging.wait(30) == 130
        finally:
            judging.kill()
