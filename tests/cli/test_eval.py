"""`ajet eval`: models on tasks, what they came to, resuming, and what is wrong with the input."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from support.http_server import Answer, Server
from support.ports import free_port
from support.scripted_helper import reply

WORKFLOW = """
from pathlib import Path
from ajet import Workflow, WorkflowOutput

class Ask(Workflow):
    name: str = "ask"

    async def execute(self, workflow_task, tuner):
        if Path("broken").exists() and workflow_task.task_id in Path("broken").read_text():
            raise RuntimeError("broken for now")
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = await client.chat.completions.create(model="m", messages=messages)
        right = (said.choices[0].message.content or "") == workflow_task.task.metadata["answer"]
        return WorkflowOutput(reward=float(right))
"""
CONFIG = """
ajet:
  project_name: tests
  experiment_name: toy
  model: {path: "tiny:qwen2-0.3m"}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}, validation: {file_path: tasks.jsonl}}
  data: {max_prompt_length: 256, max_response_length: 256}
  rollout:
    user_workflow: ask.py->Ask
    engine: scripted
    scripted_replies: replies.yaml
    max_model_len: 512
    max_response_length_in_one_turn: 64
    compute_madness_checklist: []
    val_kwargs: {do_sample: true, temperature: 1.0}
"""
TASKS = 6


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six tasks, of which the scripted model, which always says 1, solves the second."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "tasks.jsonl", range(TASKS))
    (tmp_path / "ask.py").write_text(WORKFLOW)
    (tmp_path / "replies.yaml").write_text('["1"]')
    (tmp_path / "toy.yaml").write_text(CONFIG)
    return tmp_path


def write_tasks(file: Path, numbers: Any) -> None:
    lines = [{"id": f"t{n}", "question": f"What is {n}+0?", "answer": str(n)} for n in numbers]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def server() -> Iterator[Server]:
    """A hosted model that can add, except 3+0."""

    def handle(_path: str, body: dict[str, Any], _key: str) -> Answer:
        if "messages" not in body:  # whether it takes token ids
            return 404, {}, {}
        number = body["messages"][-1]["content"].removeprefix("What is ").partition("+")[0]
        return reply("4" if number == "3" else number)

    server = Server(handle)
    yield server
    server.http.shutdown()


def evaluated(*arguments: str) -> int:
    return main(["eval", "toy.yaml", *arguments])


def asked(server: Server) -> int:
    return sum("messages" in body for _, body, _ in server.seen)


def episodes(folder: Path) -> int:
    with sqlite3.connect(folder / "episodes.sqlite") as store:
        return int(store.execute("SELECT count(*) FROM episode").fetchone()[0])


def test_one_model_prints_its_metrics_with_intervals(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated("-n", "2") == 0
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert printed["model"].endswith("tiny:qwen2-0.3m")
    assert "0.1667  (0.0301 … 0.5635)" in printed["success"] and "0.1667  (" in printed["success/pass@2"]
    assert evaluated("-n", "2", "--json") == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["val/success"] == pytest.approx(1 / 6) and metrics["val/success/low"] == pytest.approx(
        0.0301, abs=1e-4
    )


def test_an_interval_stands_beside_the_figure_that_it_is_of(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = 'if workflow_task.task_thread_index and workflow_task.task_id != "t1":'
    broken = 'if Path("broken").exists() and workflow_task.task_id in Path("broken").read_text():'
    assert broken in WORKFLOW
    (toy / "ask.py").write_text(WORKFLOW.replace(broken, fails))
    assert evaluated("-n", "4", "--json") == 0
    metrics = json.loads(capsys.readouterr().out)
    # of nine attempts with a reward the solved task has four; of six tasks it is one
    assert metrics["val/success"] == pytest.approx(4 / 9) and "val/success/low" not in metrics
    name = "val/success/pass@1"
    assert metrics[name] == pytest.approx(1 / 6)
    assert metrics[f"{name}/low"] < metrics[name] < metrics[f"{name}/high"]
    assert evaluated("-n", "4") == 0
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert printed["success"].endswith("0.4444") and "0.1667  (0.0301 … 0.5635)" in printed["success/pass@1"]


def test_a_hosted_model_against_the_base(toy: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    hosted = f"gpt@{server.url}"
    arguments = ("--model", "base", "--model", hosted, "-n", "2", "--price-input", "2", "--price-output", "10")
    assert evaluated(*arguments, "--json", "--html", "page.html") == 0
    found = json.loads(capsys.readouterr().out)
    base, other = found["cells"]
    assert base["pass_at"]["1"]["value"] == pytest.approx(1 / 6) and base["cost"] is None
    assert other["pass_at"]["1"]["value"] == pytest.approx(5 / 6) and other["repeats"] == 2
    assert (other["prompt_tokens"], other["reply_tokens"]) == (12 * 30, 12 * 10)
    assert other["cost"] == pytest.approx(12 * (30 * 2 + 10 * 10) / 1e6)
    (gain,) = found["gains"]
    # 4 of 6 tasks are better by 1, none is worse: of 2^4 signs, two lead as far
    assert gain["value"] == pytest.approx(4 / 6) and gain["p"] == pytest.approx(2 / 16)
    assert (gain["tasks"], gain["better"], gain["worse"], gain["against"]) == (6, 4, 0, "base")
    assert gain["tasks_name"] == "validation", "of several files, which it is about"
    page = (toy / "page.html").read_text()
    assert "+0.667" in page and "t3" in page and "<script" not in page and hosted in page
    assert evaluated(*arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("validation: 6 tasks × 2\n") and "+0.667 (" in out and "0.0019" in out


def test_several_files_of_tasks(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tasks(toy / "easy.jsonl", [1])
    write_tasks(toy / "hard.jsonl", [8, 9])
    assert evaluated("--tasks", "easy.jsonl", "--tasks", "hard.jsonl", "-n", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)["cells"]
    assert [(one["tasks"], one["pass_at"]["1"]["value"]) for one in found] == [("easy", 1.0), ("hard", 0.0)]


def test_a_gain_without_an_interval_is_json(toy: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    write_tasks(toy / "one.jsonl", [2])
    models = ("--model", "base", "--model", f"gpt@{server.url}", "--out", "kept")
    assert evaluated(*models, "--tasks", "one.jsonl", "-n", "1", "--json") == 0
    (gain,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["gains"]
    assert (gain["value"], gain["low"], gain["high"]) == (1.0, None, None)
    assert main(["compare", *map(str, sorted((toy / "kept").iterdir())), "--json"]) == 0
    (compared,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["gains"]
    assert compared["gain"]["low"] is None


def test_a_ci_fails_below_the_share(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated("-n", "1", "--fail-under", "0.16") == 0
    assert evaluated("-n", "1", "--fail-under", "0.8") == 1
    assert "pass@1 of base on validation is 0.1667, below --fail-under 0.8" in capsys.readouterr().err


def test_only_what_is_missing_is_played(toy: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "broken").write_text("t2 t4")
    arguments = ("--model", f"gpt@{server.url}", "--out", "kept", "--json")
    assert evaluated(*arguments, "-n", "2") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["val/failed_share"] == pytest.approx(4 / 12) and asked(server) == 8
    (cell,) = (toy / "kept").iterdir()
    (toy / "broken").unlink()
    assert evaluated(*arguments, "-n", "2") == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["val/failed_share"] == 0 and asked(server) == 12
    assert whole["val/success"] == pytest.approx(5 / 6)
    assert evaluated(*arguments, "-n", "2") == 0 and asked(server) == 12, "all is there"
    assert json.loads(capsys.readouterr().out)["val/success"] == whole["val/success"]
    assert evaluated(*arguments, "-n", "3") == 0 and asked(server) == 18, "one more of each"
    assert episodes(cell) == 12 + 4 + 6
    capsys.readouterr()
    assert main(["runs", "kept"]) == 0 and "completed" in capsys.readouterr().out


def test_an_interrupted_evaluation_goes_on(
    toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajet.backbone import evaluation

    takes = evaluation.EvaluationCell.take
    monkeypatch.setattr(
        evaluation.EvaluationCell, "take", lambda cell, episode: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert evaluated("-n", "2", "--out", "kept") == 130
    assert "the same command goes on from kept" in capsys.readouterr().err
    monkeypatch.setattr(evaluation.EvaluationCell, "take", takes)
    before = episodes(toy / "kept" / "base-validation")
    assert evaluated("-n", "2", "--out", "kept") == 0
    assert before == episodes(toy / "kept" / "base-validation") == 12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda toy: (toy / "ask.py").write_text(WORKFLOW + "# changed\n"), "code ask.py"),
        (lambda toy: write_tasks(toy / "tasks.jsonl", range(1, TASKS)), "tasks: "),
        (lambda toy: (toy / "toy.yaml").write_text(CONFIG.replace(": 1.0}", ": 0.5}")), "1.0 then, 0.5 now"),
        (lambda toy: (toy / "toy.yaml").write_text(CONFIG.replace("qwen2", "llama")), "model: tiny:qwen2-0.3m then"),
    ],
)  # fmt: skip
def test_another_fingerprint_is_refused(toy: Path, capsys: pytest.CaptureFixture[str], change: Any, named: str) -> None:
    assert evaluated("-n", "1", "--out", "kept") == 0
    change(toy)
    assert evaluated("-n", "1", "--out", "kept") == 2
    error = capsys.readouterr().err
    assert "was played with something else" in error and named in error and "choose another folder" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-n", "0"), "-n/--repeats: '0': write a whole number, at least 1"),
        (("--fail-under", "80"), "--fail-under: '80': write a number from 0 to 1"),
        (("--price-input", "-1"), "write a number, at least 0"),
        (("--tasks", "nowhere.jsonl"), "no such file"),
        (("--tasks", "empty.jsonl"), "empty.jsonl"),
        (("--model", "no-such-run"), "no-such-run"),
        (("--model", "http://127.0.0.1/v1"), "NAME@http"),
        (("--model", "base", "--model", "base"), "two have this name"),
        (("--model", "base", "--checkpoint", "base"), "two have this name"),
        (("--out", "toy.yaml"), "is not a folder"),
    ],
)
def test_what_is_wrong_is_named(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    (toy / "empty.jsonl").write_text("")
    assert evaluated(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_no_validation_tasks(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "toy.yaml").write_text(CONFIG.replace(", validation: {file_path: tasks.jsonl}", ""))
    assert evaluated() == 2
    error = capsys.readouterr().err
    assert "no validation tasks" in error and "--tasks" in error


@pytest.mark.parametrize("models", [("base",), ("base", "tiny:llama")])
def test_a_workflow_that_always_raises(models: tuple[str, ...], toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "broken").write_text(" ".join(f"t{n}" for n in range(TASKS)))
    named = [part for model in models for part in ("--model", model)]
    assert evaluated(*named, "-n", "1", "--fail-under", "0.1") == 1
    said = capsys.readouterr().err
    assert all(
        f"{model} on validation: {TASKS} × workflow_error, RuntimeError: broken for now" in said for model in models
    )


def test_a_server_that_is_down(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = f"gpt@http://127.0.0.1:{free_port()}/v1"
    assert evaluated("--model", dead, "-n", "1", "rollout.remote.max_attempts=1") != 0
    printed = capsys.readouterr()
    assert "127.0.0.1" in printed.err + printed.out and "Traceback" not in printed.err


def test_warnings_are_shown(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = 'if workflow_task.task_id == "t0": return WorkflowOutput(reward=1.0)'
    (toy / "ask.py").write_text(WORKFLOW.replace("client = ", f"{silent}\n        client = "))
    assert evaluated("-n", "1") == 0
    assert "1 of 6 episodes of the validation made no model call that was recorded" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_costs_no_result(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluated("-n", "1", "--html", str(toy)) == 2
    printed = capsys.readouterr()
    assert "success" in printed.out and f"{toy}: Is a directory" in printed.err


def test_an_environment_is_evaluated(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "guess.py").write_text(ENVIRONMENT)
    keys = ("rollout.environment=guess.py->Guess", "rollout.user_workflow=guess.py->Play")
    assert evaluated("-n", "1", *keys, "--json") == 0
    assert json.loads(capsys.readouterr().out)["val/success"] == pytest.approx(1 / 6)


ENVIRONMENT = """
from ajet import Workflow, WorkflowOutput
from ajet.environment import Environment, StepResult

class Guess(Environment):
    def reset(self, task):
        self.answer = task.metadata["answer"]
        return task.main_query

    def step(self, action):
        return StepResult("", float(action == self.answer), True)

class Play(Workflow):
    name: str = "play"

    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": "guess"}]
        said = await client.chat.completions.create(model="m", messages=messages)
        step = await workflow_task.gym_env.astep(said.choices[0].message.content)
        return WorkflowOutput(reward=step.reward)
"""
