"""`ajet audit`: figures, probes of the reward, one verdict; `--time`; what is wrong with the input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from support.ports import free_port

ROOT = Path(__file__).parents[2]
WORKFLOW = """
from ajet import Workflow, WorkflowOutput

class Ask(Workflow):
    name: str = "ask"

    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(1 + workflow_task.task_thread_index % 2):  # the second reply of the script solves a task
            said = await client.chat.completions.create(model="m", messages=messages)
        return WorkflowOutput(metadata={"final_answer": said.choices[0].message.content or ""})
"""
JUDGE = """
from ajet.task_judge.base_judge import BaseJudge

class Judge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        said, task = workflow_output.metadata["final_answer"], workflow_task.task
        right = said == "\\\\boxed{" + str(task.metadata["answer"]) + "}"
        return float(RULE)
"""
CONFIG = """
ajet:
  project_name: tests
  experiment_name: toy
  model: {path: "tiny:qwen2-0.3m"}
  task_reader: {type: jsonl_dataset_file, jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 8, max_prompt_length: 256, max_response_length: 256}
  task_judge: {judge_protocol: judge.py->Judge}
  rollout:
    user_workflow: ask.py->Ask
    engine: scripted
    scripted_replies: replies.yaml
    max_model_len: 512
    max_response_length_in_one_turn: 64
    compute_madness_checklist: []
"""
REPLIES = '["I am afraid that I have no idea at all", "\\\\boxed{7}"]'


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three tasks, of which the scripted model solves one in every second episode, and a judge without a hole."""
    monkeypatch.chdir(tmp_path)
    tasks = [{"id": f"t{n}", "question": f"What is {n - 2}+2?", "answer": str(n)} for n in (7, 18, 29)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "ask.py").write_text(WORKFLOW)
    (tmp_path / "replies.yaml").write_text(REPLIES)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    judged(tmp_path, "right")
    return tmp_path


def judged(folder: Path, rule: str) -> None:
    (folder / "judge.py").write_text(JUDGE.replace("RULE", rule))


def audit(*arguments: str) -> int:
    return main(["audit", "toy.yaml", "--repeats", "2", *arguments])


def test_a_toy_that_can_be_trained(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--json") == 0
    said = json.loads(capsys.readouterr().out)
    found = said["figures"]
    assert (found["episodes"], found["usable"], found["tasks"]) == (6, 6, 3)
    assert found["pass_at"]["1"][0] == pytest.approx(1 / 6) and found["pass_at"]["2"][0] == pytest.approx(1 / 3)
    assert found["mixed"][0] == pytest.approx(1 / 3) and not said["stopped_early"]
    earned = {kind: [p["reward"] for p in said["probes"] if p["kind"] == kind] for kind in ("gold", "empty", "echo")}
    assert earned == {"gold": [1, 1, 1], "empty": [0, 0, 0], "echo": [0, 0, 0]}
    assert said["skipped"] == {} and {p["kind"] for p in said["probes"]} >= {"format only", "longest", "shortest"}
    assert said["verdict"]["what"] == "train" and said["advice"] == ["ajet --conf toy.yaml"]


def test_the_command_that_is_advised_holds_no_secret(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("helper.model=m", "helper.base_url=http://h/v1", "helper.api_key=topsecret-0815") == 0
    said = capsys.readouterr()
    assert "helper.base_url=http://h/v1 helper.api_key=********\n" in said.out
    assert "topsecret" not in said.out + said.err


def test_a_task_that_is_never_solved(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "replies.yaml").write_text('["no idea"]')
    assert audit() == 1
    said = capsys.readouterr().out
    assert "verdict: imitate first\n    every episode earned 0: of the 8 groups" in said
    assert "algorithm.sft.demonstrations=talks.jsonl" in said and said.count("verdict:") == 1
    assert "\n    then train: model.path=saved_experiments/" in said
    assert audit("experiment_dir=runs/the first") == 1
    said = capsys.readouterr().out
    assert "ajet --conf toy.yaml 'experiment_dir=runs/the first' 'experiment_dir=runs/the first_cold_start' " in said
    assert "\n    then train: 'model.path=runs/the first_cold_start/hf'" in said


def test_replies_that_a_limit_cuts(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("rollout.max_response_length_in_one_turn=2") == 1
    said = capsys.readouterr().out
    assert "verdict: change limits" in said and "ajet.rollout.max_response_length_in_one_turn: 4, or" in said


@pytest.mark.parametrize(
    ("rule", "hole"),
    [
        ("right or not said", "an empty reply is rewarded in 3 of 3 tasks: '' earns 1, the right answer 1"),
        ("right or said == task.main_query", "the question said back is rewarded in 3 of 3 tasks: 'What is 5+2?'"),
        ("'boxed' in said", "the right form with another task's answer is rewarded in 3 of 3 tasks"),
        ("min(1, len(said) / 39) if not right else 1", "the longest reply to another task is rewarded in"),
        ("right or said.startswith('I am')", "the longest reply to another task is rewarded in"),
        ("0", "the right answer earns no more than a wrong one: '7' earns 0"),
        ("right if said else [][0]", "the judge fails on an empty reply (''): judge_error, IndexError"),
    ],
)
def test_a_hole_of_each_kind(toy: Path, capsys: pytest.CaptureFixture[str], rule: str, hole: str) -> None:
    judged(toy, rule)
    assert audit() == 1
    said = capsys.readouterr().out
    assert f"verdict: change the reward\n    {hole}" in said


def test_what_cannot_be_tested_is_said(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "tasks.jsonl").write_text('{"id": "a", "question": "Say it", "answer": ""}')
    judged(toy, "'boxed' in said")
    assert audit() == 0
    said = capsys.readouterr().out
    assert said.count("skipped: the tasks have no right answer: --answer-field names where it is") == 4
    assert "  empty              0 " in said


def test_the_form_of_an_answer_can_be_given(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged(toy, "said == 'It is {' + str(task.metadata['answer']) + '}'")
    assert audit() == 1
    assert "the right answer earns no more than a wrong one" in capsys.readouterr().out
    assert audit("--answer-field", "answer", "--answer-form", "It is {{answer}}") == 1
    said = capsys.readouterr().out
    assert "gold               1 1 1" in said and "verdict: imitate first" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "0"], "write a whole number, at least 1"),
        (["--repeats", "1"], "write a whole number, at least 2"),
        (["--max-minutes", "never"], "'never': write a number of minutes, at least 0.001"),
        (["--gpu-hour", "2"], "add --time"),
        (["--answer-field", "gold"], "no task has this field; the first has 'answer'"),
        (["--answer-form", "42"], "write {answer} where the answer stands"),
        (["task_runner.wrapper_type=remote"], "Try it with task_runner.wrapper_type=asyncio"),
        (["rollout.num_repeet=2"], "did you mean"),
    ],
)
def test_wrong_input(toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["audit", "toy.yaml", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


def test_a_judge_that_always_raises(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged(toy, "[][0]")
    assert audit() == 2
    assert "the judge failed in 6 of 6 episodes of the audit" in capsys.readouterr().err


def test_a_workflow_that_always_raises(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toy / "ask.py").write_text(WORKFLOW.replace("        return", "        raise ValueError('oh')\n        return"))
    assert audit("--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "0 of 6 episodes have one\n    6 × workflow_error, ValueError: oh, at ask.py" in error


@pytest.mark.slow
def test_a_dead_helper(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helper = [f"helper.base_url=http://127.0.0.1:{free_port()}/v1", "helper.model=m", "helper.timeout=2"]
    judge = ["task_judge.judge_type=llm_judge", "task_judge.llm_judge.retries=0"]
    assert audit("--tasks", "1", *helper, *judge) == 2
    assert "the helper model failed in all 2 episodes of the audit" in capsys.readouterr().err


@pytest.mark.slow
def test_time_runs_out(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = WORKFLOW.replace("        client", "        import asyncio; await asyncio.sleep(60)\n        client")
    (toy / "ask.py").write_text(slow)
    assert audit("--max-minutes", "0.01") == 1
    assert "time was up: raise --max-minutes" in capsys.readouterr().err


@pytest.mark.slow
def test_nobody_reads_the_output(toy: Path) -> None:
    command = [sys.executable, "-m", "ajet", "audit", "toy.yaml", "--repeats", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        ran.stdout.close()
        assert "Traceback" not in ran.stderr.read()
    assert ran.returncode == 141


@pytest.mark.slow
def test_the_quickstart_can_be_trained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["audit", "configs/quickstart.yaml", "--tasks", "8", "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["figures"]["pass_at"]["8"][0] > 0.8 and said["figures"]["tool_calls"] > 0
    assert all(probe["success"] == (probe["kind"] == "gold") for probe in said["probes"])
    assert main(["audit", "configs/quickstart.yaml", "model.path=tiny:qwen2-0.3m", "--tasks", "4"]) == 1
    assert "and the model writes noise" in capsys.readouterr().out


@pytest.mark.slow
def test_time_is_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("say_vowels.yaml", "say_vowels.jsonl", "say_vowels.py"):
        (tmp_path / name).write_text((ROOT / "tests" / "support" / name).read_text())
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    more = ["total_training_steps=100", "test_freq=10", "val_before_train=true", "resume=auto"]
    command = ["audit", "say_vowels.yaml", "--time", *(f"trainer_common.{key}" for key in more)]
    assert main([*command, "--gpu-hour", "3600", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["steps"], said["validations"], said["episodes"], said["gpus"]) == (100, 11, 1600, 1)
    assert said["gpu_cost"] == pytest.approx(3600 * said["hours"])
    least = 100 * min(said["step_s"], said["first_step_s"])
    assert 3600 * said["hours"] > least > 0 and said["sampled_tokens"] > 0
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before
    assert main([*command, "trainer_common.total_training_steps=2"]) == 2
    assert "just run it" in capsys.readouterr().err
