"""`--backbone=debug`, end to end on a tiny model: in a process where somebody types, interrupts or stops reading."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support import in_process

WORKFLOW = """
import asyncio, time
from ajet import Workflow, WorkflowOutput, bp

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        act = workflow_task.task.metadata.get("act", "talk")
        print("began", act, flush=True)
        if act == "raise":
            raise KeyError("mine")
        if act == "hang":
            await asyncio.to_thread(time.sleep, 600)
        secret = 41
        bp("HERE")
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        reply = await client.chat.completions.create(model="any", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "[bold]go on[/bold] \\x1b[31m"})
        await client.chat.completions.create(model="any", messages=messages)
        return WorkflowOutput(reward=0.5, metadata={"secret": secret}, log_metrics={"half": 0.5})
"""

CONFIG = """
ajet:
  model: {{path: tiny:qwen2-0.3m}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: {folder}/tasks.jsonl}}}}
  rollout:
    user_workflow: agent.py->Agent
    max_response_length_in_one_turn: 8
    max_model_len: 512
    compute_madness_checklist: []
  data: {{max_prompt_length: 256, max_response_length: 256}}
  debug: {{debug_first_n_tasks: 3}}
"""


def project(folder: Path, *acts: str) -> Path:
    """Writes a project with one task per act. Returns the path of its YAML."""
    (folder / "agent.py").write_text(textwrap.dedent(WORKFLOW))
    lines = [{"main_query": f"Say {act}", "task_id": act, "metadata": {"act": act}} for act in acts]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "x.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "x.yaml"


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--conf", str(folder / "x.yaml"), "--backbone=debug", "--exp-dir", str(folder / "runs"), *more]


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "ajet", *arguments(folder, *more)]


def debug(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return in_process.ajet(folder, *arguments(folder, *more))


def ajet(folder: Path, *more: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *more), capture_output=True, text=True, input=typed, timeout=300, cwd=folder, check=False
    )


@pytest.mark.slow
def test_episodes_are_shown_recorded_and_counted(tmp_path: Path) -> None:
    project(tmp_path, "talk", "raise", "never")
    done = debug(tmp_path, "debug.debug_first_n_tasks=2")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "task talk" in shown and "Say talk" in shown and "never" not in shown
    assert "default_agent · turn 1 (8 tokens, length)" in shown
    assert shown.count("user: Say talk") == 1, "a branch is shown from where it parts"
    assert r"[bold]go on[/bold] \x1b[31m" in shown, "a model's text is neither markup nor terminal control codes"
    assert "workflow_error · no reward · 0 turns" in shown
    assert "KeyError: 'mine'" in shown and "agent.py" in shown
    assert "2 episodes, 1 without a reward" in shown
    folder = tmp_path / "runs" / "x-debug"
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["return/mean"] == 0.5 and metrics["episode/failed_share"] == 0.5
    assert metrics["status/workflow_error"] == 1
    assert (folder / "episodes.sqlite").stat().st_size > 0
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["status"] == "completed"


@pytest.mark.slow
def test_one_json_object_an_episode(tmp_path: Path) -> None:
    project(tmp_path, "talk")
    done = debug(tmp_path, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["episode", "ended"]
    assert (lines[0]["task"], lines[0]["status"], lines[0]["reward"]) == ("talk", "truncated", 0.5)
    assert [call["reply"]["role"] for call in lines[0]["calls"]] == ["assistant", "assistant"]
    assert lines[0]["calls"][0]["new_messages"] == [{"role": "user", "content": "Say talk"}]


@pytest.mark.slow
def test_all_failed_is_a_failure(tmp_path: Path) -> None:
    project(tmp_path, "raise")
    assert debug(tmp_path, "--quiet").returncode == 1


@pytest.mark.slow
def test_mistakes_are_told_before_anything_heavy_and_end_with_2(tmp_path: Path) -> None:
    project(tmp_path, "talk")
    done = debug(tmp_path, "rollout.user_workflow=agent.py->Agnt")
    assert done.returncode == 2
    assert "ajet.rollout.user_workflow" in done.stderr and "did you mean 'Agent'" in done.stderr
    done = debug(tmp_path, f"model.path={tmp_path}/no_model")
    assert done.returncode == 2
    assert "no_model" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_isolated_workflows(tmp_path: Path) -> None:
    project(tmp_path, "talk", "raise")
    done = debug(tmp_path, "task_runner.wrapper_type=multi-processing")
    assert done.returncode == 0, done.stderr
    assert "truncated (length) · reward 0.5 · 2 turns" in done.stdout
    assert "KeyError: 'mine'" in done.stdout


@pytest.mark.slow
def test_a_breakpoint_stops_in_the_workflow(tmp_path: Path) -> None:
    project(tmp_path, "talk")
    done = ajet(tmp_path, "--debug", "HERE", "rollout.episode_timeout=0.01", typed="p secret + 1\ncontinue\n")
    assert "(Pdb) 42" in done.stdout
    assert done.returncode == 0
    assert "reward 0.5" in done.stdout, "no deadline while someone looks"


@pytest.mark.slow
def test_leaving_the_debugger_ends_the_run(tmp_path: Path) -> None:
    project(tmp_path, "talk", "talk2", "talk3")
    done = ajet(tmp_path, "--debug", "HERE", typed="quit\n")
    assert done.returncode == 130
    assert done.stdout.count("began") == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_ctrl_c_ends_cleanly(tmp_path: Path, wrapper: str) -> None:
    project(tmp_path, "hang")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command(tmp_path, f"task_runner.wrapper_type={wrapper}"), **options) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            if "began hang" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "cancelled" in rest
    folder = tmp_path / "runs" / "x-debug"
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_goes_away_ends_the_run(tmp_path: Path, more: tuple[str, ...]) -> None:
    """`ajet … --backbone=debug | head -1`: on any thread, without a traceback."""
    project(tmp_path, "talk", "talk2", "talk3")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command(tmp_path, *more), **options) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            if "began" in line:
                break
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors
    folder = tmp_path / "runs" / "x-debug"
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["status"] == "interrupted"


def test_a_mistyped_tag_is_refused(tmp_path: Path) -> None:
    project(tmp_path, "talk")
    done = ajet(tmp_path, "--debug", "HER")
    assert done.returncode == 2
    assert 'no bp("HER") in your sources' in done.stderr
    assert "did you mean HERE? there are: HERE" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_breakpoint_runs_one_episode_at_a_time(tmp_path: Path) -> None:
    project(tmp_path, "talk", "talk2", "talk3")
    agent = tmp_path / "agent.py"
    agent.write_text(agent.read_text().replace('bp("HERE")', "breakpoint()"))
    done = ajet(tmp_path, "rollout.episode_timeout=0.01", typed="p act\nc\n" * 3)
    assert done.returncode == 0, done.stderr
    assert "breakpoint() in agent.py:14: one episode at a time, without deadlines" in done.stderr
    began = [line for line in done.stdout.splitlines() if line.startswith("began") or "(Pdb) '" in line]
    assert [("began" in line) for line in began] == [True, False] * 3
    assert "3 episodes, 0 without a reward" in done.stdout


@pytest.mark.slow
def test_a_breakpoint_that_nobody_foresaw_has_the_prompt_to_itself(tmp_path: Path) -> None:
    """Several episodes are running when it stops; its name hides it from a look at the sources."""
    project(tmp_path, "talk", "talk2", "talk3")
    agent = tmp_path / "agent.py"
    hidden = "import sys; getattr(sys, 'break' + 'pointhook')()\n        step = act\n        step = step"
    agent.write_text(agent.read_text().replace('bp("HERE")', hidden))
    done = ajet(tmp_path, typed="p act\nn\np act\nc\n" * 3)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"'talk\d?'", done.stdout)  # what another episode prints may stand between prompt and value
    assert len(shown) == 6, done.stdout
    assert shown[0::2] == shown[1::2] and len(set(shown)) == 3, "each episode has the prompt until it goes on"
