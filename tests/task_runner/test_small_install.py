"""The wheel without its extra `train`, in an environment of its own: no torch, and everything but training works.

`AJET_SMALL_PYTHON` names the Python of such an environment that is already there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.episode import EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.remote import KEY_VARIABLE, RemoteRunner
from ajet.task_runner.runner import TaskRunner
from support.http_server import Server
from support.runner_fakes import LineEngine, SmallProvider

ROOT = Path(__file__).parents[2]
KEY = "sk-ajet-" + "s" * 40
AGENT = """
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return WorkflowOutput(reward=len(reply.choices[0].message.content))
"""
SOLVER = """
import sys
from ajet import Trainer, emit_message, emit_reward, operation, rollout

@operation
def think(question):
    emit_message(question)

@rollout
async def solver(task, model):
    think(task["main_query"])
    emit_reward(len((await model([{"role": "user", "content": "hi"}]))["content"]) / 10)

if __name__ == "__main__":
    try:
        Trainer(model="tiny:qwen2").fit(solver, [{"main_query": "hi"}])
    except Exception as error:
        print(type(error).__name__, error)
"""
ALONE = """
import asyncio, sys
from ajet.agents import ReActAgent, as_model_function

async def main():
    agent = ReActAgent(tools=["calculator"], max_steps=4)
    done = await agent.run_trajectory("What is 6*7?", as_model_function(sys.argv[1], "m"), save_to="trajectories/")
    print(done.final_response)

asyncio.run(main())
"""
STORED = """
import asyncio, sys
from ajet.store.client import StoreClient

async def main():
    async with StoreClient(sys.argv[1], sys.argv[2]) as store:
        print((await store.enqueue_one({"question": 1})).status)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("AJET_SMALL_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("small")
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "download", "-q", "--no-deps", "-d", folder / "try", "packaging"], check=False).returncode:
        pytest.skip("pip reaches no package index")
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder / "wheel", str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    made = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(made), "install", "-q", "--no-compile", str(wheel)], check=True)
    return made


def environment() -> dict[str, str]:
    """Ours, but for the clone's path: the wheel is what is tried."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {KEY_VARIABLE: KEY}


def ran(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


@contextmanager
def serving(python: Path, folder: Path, *arguments: str) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """A program that serves, and what it printed until it did."""
    program = subprocess.Popen(
        [str(python), "-m", "ajet", *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert program.stdout is not None
        lines: list[str] = []
        for line in program.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        yield lines, program
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def answer(_path: str, body: dict[str, Any], _key: str) -> Any:
    last = body["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": f"It is {last['content']}."}
    if last["role"] != "tool":
        function = {"name": "calculator", "arguments": json.dumps({"expression": "6*7"})}
        message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    reply = {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return 200, {"content-type": "application/json"}, reply


@pytest.mark.slow
def test_there_is_no_torch_and_the_commands_say_what_they_need(python: Path, tmp_path: Path) -> None:
    names = ("torch", "transformers", "datasets", "safetensors", "pandas", "ray")
    there = ran(python, tmp_path, "-c", f"from importlib.util import find_spec as f; print(*filter(f, {names}))")
    assert there.stdout.split() == []
    assert ran(python, tmp_path, "-m", "ajet", "--help").returncode == 0
    doctor = ran(python, tmp_path, "-m", "ajet", "doctor")
    assert doctor.returncode == 0 and "Ready for runners" in doctor.stdout
    assert re.search(r"Not for training, .* need torch: pip install '.*(\[train\]'|torch>=)", doctor.stdout)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "hi"}\n')
    reader = "task_reader: {jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}"
    (tmp_path / "c.yaml").write_text(f"ajet: {{model: {{path: tiny:qwen2}}, {reader}}}")
    conf = ("c.yaml", "rollout.user_workflow=agent.py->Agent")
    train = r"\n +pip install '.*(\[train\]'|torch>=)"
    for command, needs in (
        (("--conf", *conf), "--backbone=local needs"),
        (("--conf", *conf, "--backbone=debug"), "--backbone=debug needs"),
        (("chat", *conf), "needs"),
    ):
        done = ran(python, tmp_path, "-m", "ajet", *command)
        assert done.returncode == 2, done.stderr
        assert re.search(f"{needs} .*the small installation doesn't have{train}", done.stderr), done.stderr
    planned = ran(python, tmp_path, "-m", "ajet", "validate", *conf)
    assert planned.returncode == 0, planned.stderr
    assert "tasks      1 to train on" in planned.stdout and "c.yaml is valid" in planned.stdout
    assert re.search(r"unchecked +the model and its chat template, which needs torch: pip install", planned.stdout)
    assert not (tmp_path / "saved_experiments").exists()


@pytest.mark.slow
def test_an_agent_alone_and_its_trajectory_in_the_viewer(python: Path, tmp_path: Path) -> None:
    server = Server(answer)
    done = ran(python, tmp_path, "-c", ALONE, f"{server.url}")
    assert (done.stdout.strip(), done.stderr) == ("It is 42.", "")
    with serving(python, tmp_path, "view", "trajectories", "--port", "0", "--no-browser") as (lines, _):
        url = next(line.split()[0] for line in lines if line.startswith("http"))
        assert urllib.request.urlopen(url, timeout=60).status == 200


@pytest.mark.slow
def test_the_store_serves(python: Path, tmp_path: Path) -> None:
    with serving(python, tmp_path, "store", "--path", "s.sqlite", "--port", "0") as (lines, _):
        keys = dict(line.split() for line in lines if len(line.split()) == 2)
        url = lines[-1].split()[2]
        done = ran(python, tmp_path, "-c", STORED, url, keys["writer"])
        assert done.stdout.strip() == "queuing", done.stderr


def test_the_python_api_says_what_training_needs(python: Path, tmp_path: Path) -> None:
    (tmp_path / "solver.py").write_text(SOLVER)
    done = ran(python, tmp_path, "solver.py")
    assert done.stdout.startswith("MissingDependencyError --backbone=local needs"), done.stdout + done.stderr
    assert "[train]" in done.stdout


def test_little_is_imported_by_a_runner() -> None:
    """In the environment of the tests, which has torch: what a runner and the Python API import is light there, too."""
    code = "import sys, ajet, ajet.cli.runner, ajet.task_runner.remote, ajet.store.client; from ajet import *"
    heavy = "print(sorted({'torch', 'transformers', 'datasets', 'pandas', 'scipy', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(("code", "workflow", "reward"), [(AGENT, "Agent", 5.0), (SOLVER, "solver", 0.5)])
def test_a_runner_works_for_a_trainer(
    code: str, workflow: str, reward: float, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (tmp_path / "agent.py").write_text(textwrap.dedent(code))
    config = make_config({
        "rollout.user_workflow": f"{tmp_path}/agent.py->{workflow}",
        "task_runner.wrapper_type": "remote",
        "task_runner.remote.port": 0,
    })  # fmt: skip

    async def run() -> None:
        sessions = SmallProvider(config, LineEngine("hello"))
        attempts = RemoteRunner(config, sessions, None)
        await attempts.start()
        with serving(python, tmp_path, "runner", "--connect", attempts.url, "--workflow", f"agent.py->{workflow}"):
            done = await TaskRunner(sessions, attempts).run(WorkflowTask(task=Task(task_id="t", main_query="hi")))
        assert (done.status, done.reward) == (EpisodeStatus.COMPLETED, reward), done.failure
        await attempts.aclose()
        if sessions.gateway is not None:
            await sessions.gateway.aclose()

    asyncio.run(run())
