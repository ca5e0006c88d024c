"""`ajet rollout` and `ajet view` on its trajectories, against a real server and with a tiny model; `ajet tools`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet.agents.tools import get_global_tool_registry
from ajet.cli.main import main
from ajet.cli.runs import shown_folder
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.viewer.episode_view import episode_view, tokens_view
from ajet.observe.viewer.library import Library
from support.http_server import Server
from support.screen import Terminal

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def answer(path: str, body: dict[str, Any], key: str) -> Any:
    """Asks the calculator, then says what it said."""
    last = body["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": f"The answer is {last['content']}."}
    if last["role"] != "tool":
        expression = last["content"].removeprefix("What is ").rstrip("?")
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    reply = {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return 200, {"content-type": "application/json"}, reply


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    right = {"id": "a", "question": "What is 6*7?", "answer": "42"}
    wrong = {"id": "b", "question": "What is 2+2?", "answer": 5}
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in (right, wrong)))
    return tmp_path


def rollout(*arguments: str) -> int:
    return main(["rollout", "--tasks", "tasks.jsonl", "--out", "out", *arguments])


def test_a_batch_against_a_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(answer)
    command = ("--model", server.url, "--model-name", "m", "-n", "2", "--price-output", "1000", "tools=[calculator]")
    assert rollout(*command) == 0
    said = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in said.out.splitlines())
    assert lines["pass@1"] == "0.5000" and lines["pass@2"] == "0.5000"
    assert lines["cost"] == "0.0400" and lines["tokens"] == "80 in, 40 out"
    assert "4/4: 50% succeeded" in said.err
    asked = len(server.seen)
    assert rollout(*command) == 0 and len(server.seen) == asked  # nothing is left to do

    from ajet.backbone.local.demonstrations import read_demonstrations
    from ajet.context_tracker import Renderer
    from ajet.engine.model_source import ModelSource

    renderer = Renderer(ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    episodes = read_demonstrations(folder / "out" / "demonstrations.jsonl", renderer)
    assert len(episodes) == 2 and all(episode.tree.trained_tokens for episode in episodes)


REPL = """
import contextlib, io, time
from ajet.agents.tools import tool

@tool
def calculator(expression: str) -> str:
    'Computes.'
    with contextlib.redirect_stdout(io.StringIO()) as said:
        time.sleep(0.2)
        print(eval(expression))
        time.sleep(0.2 * len(expression))
    return said.getvalue()
"""


def test_tools_that_capture_standard_output_do_not_take_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that began first ends first, and so the other puts back what that one had put there."""
    (folder / "mine.py").write_text(REPL)
    tasks = [{"id": str(n), "question": f"What is {'1*' * n}1?", "answer": "1"} for n in range(4)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    server = Server(answer)
    before = sys.stdout
    assert rollout("--model", server.url, "--model-name", "m", "tools=[mine.py->calculator]") == 0
    assert sys.stdout is before
    assert "to look at them: ajet view out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--temperature", "0.5"), "sampling"),
        (("--max-tokens", "9"), "sampling"),
        (("tools=[calculator, finish]",), "tools"),
        (("--judge", "own.py->Judge"), "judge"),
        (("max_steps=3",), "agent"),
    ],
)
def test_other_settings_need_another_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str
) -> None:
    (folder / "own.py").write_text(
        "from ajet.task_judge.base_judge import BaseJudge\n"
        "class Judge(BaseJudge):\n    def compute_reward(self, task, output):\n        return 0.25, False\n"
    )
    server = Server(answer)
    command = ("--model", server.url, "--model-name", "m", "sampling={temperature: 1}", "tools=[calculator]")
    assert rollout(*command) == 0
    asked = len(server.seen)
    assert rollout(*command, *more) == 2
    assert f"a-0.jsonl was made with another {named}: choose another folder" in capsys.readouterr().err
    assert len(server.seen) == asked


def test_what_a_flag_says_is_sent(folder: Path) -> None:
    server = Server(answer)
    command = ("--model", server.url, "--model-name", "m", "sampling={temperature: 1, top_p: 0.5}")
    assert rollout(*command, "--temperature", "0.25", "--limit", "1") == 0
    assert (server.seen[0][1]["temperature"], server.seen[0][1]["top_p"]) == (0.25, 0.5)


def test_the_viewer_shows_trajectories_without_a_run(folder: Path) -> None:
    assert rollout("--model", Server(answer).url, "--model-name", "m", "tools=[calculator]", "--quiet") == 0
    with shown_folder(folder / "out") as root:
        assert root != folder / "out"
        experiment = Library(root).get("out")
        store = experiment.store()
        assert store is not None
        rows, total = store.page(sort="task_id", descending=False)
        assert total == 2 and [row["reward"] for row in rows] == [1.0, 0.0]
        view = episode_view(store.get("a-0"), store)
        assert [call["reply"].get("content") for call in view["calls"]] == ["", "The answer is 42."]
        assert view["calls"][1]["extends"] == 0 and view["toolsets"][0][0]["function"]["name"] == "calculator"
        assert tokens_view(store.get("a-0"), store)["runs"] == []
    assert not root.exists()
    assert not list((folder / "out").glob("*.sqlite*"))


def test_a_trajectory_that_grows_while_it_is_shown(folder: Path) -> None:
    from ajet.agents import Trajectory
    from ajet.observe.viewer import TrajectoryFolder
    from ajet.schema.trajectory import ModelCall, StopReason, TrajectoryFile

    (folder / "shown").mkdir()
    trajectory = Trajectory("grows")
    file = TrajectoryFile(folder / "out" / "grows.jsonl", trajectory)
    shown = TrajectoryFolder(folder / "out", folder / "shown")
    assert shown.sync() == 1 and shown.sync() == 0
    store = EpisodeStore(folder / "shown" / "episodes.sqlite")
    assert store.get("grows").episode.failure is not None
    trajectory.calls.append(ModelCall([{"role": "user", "content": "?"}], {"role": "assistant", "content": "!"}))
    trajectory.end(StopReason.ANSWER)
    file.close()
    (folder / "out" / "broken.jsonl").write_text('{"trajectory": {}}\nnonsense\n')
    assert shown.sync() == 1
    episode = store.get("grows").episode
    assert episode.failure is None and len(episode.tree.calls) == 1
    store.close()
    shown.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "http://127.0.0.1:9/v1"], "is the server up?"),
        (["--model", "tiny:none"], "does not exist"),
        (["--model", "tiny:qwen2-0.3m", "tools=[calculater]"], "did you mean 'calculator'"),
        (["--model", "tiny:qwen2-0.3m", "tools=[calc"], "setting tools:2: not YAML"),
        (["--model", "tiny:qwen2-0.3m", "max_step=3"], "did you mean 'max_steps'"),
        (["--model", "tiny:qwen2-0.3m", "--agent", "raect"], "did you mean 'react'"),
        (["--model", "tiny:qwen2-0.3m", "--judge", "nothing->Here"], "no module 'nothing'"),
        (["--model", "tiny:qwen2-0.3m", "-n", "0"], "write a whole number, at least 1"),
        (["--model", "tiny:qwen2-0.3m", "--max-tokens", "0"], "--max-tokens: '0': write a whole number, at least 1"),
        (["--model", "tiny:qwen2-0.3m", "--price-input", "-1"], "--price-input: '-1': write a number, at least 0"),
        (["--model", "tiny:qwen2-0.3m", "--sandbox", "bubblewarp"], "--sandbox bubblewarp"),
        (["--model", "tiny:qwen2-0.3m", "--sandbox", "{kind: none"], "--sandbox:2: not YAML"),
        (["--model", "tiny:qwen2-0.3m", "--sandbox", "{memry_mb: 5}"], "did you mean"),
        (["--model", "tiny:qwen2-0.3m", "--sandbox", "{kind: docker}"], "--sandbox {kind: docker}: "),
        (["--model", "tiny:qwen2-0.3m", "--tasks", "none.jsonl"], "no such file"),
        (["--model", "tiny:qwen2-0.3m", "--out", "tasks.jsonl"], "not a folder"),
    ],
)
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert rollout(*arguments) == 2
    assert says in capsys.readouterr().err


def test_an_address_that_answers_with_a_web_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout("--model", Server(answer, get=lambda path: "<html>").url) == 2
    assert "is the server up?" in capsys.readouterr().err


def uses_bash(path: str, body: dict[str, Any], key: str) -> Any:
    """Looks where it is, then answers."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return answer(path, {"messages": [last]}, key)
    status, headers, reply = answer(path, body, key)
    command = "echo $((6 * 7)); pwd; cat /etc/shadow 2>/dev/null | wc -l"
    reply["choices"][0]["message"]["tool_calls"][0]["function"] = {
        "name": "bash",
        "arguments": json.dumps({"command": command}),
    }
    return status, headers, reply


@needs_bwrap
def test_tools_run_in_a_sandbox(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ajet.agents import read_trajectory

    command = ("--model", Server(uses_bash).url, "--model-name", "m", "tools=[bash]", "--limit", "1")
    assert rollout(*command) == 1
    assert "needs a sandbox: set ajet.rollout.sandbox, or --sandbox" in capsys.readouterr().out
    assert rollout(*command, "--sandbox", "{kind: bubblewrap, memory_mb: 64}") == 0
    results = [step for step in read_trajectory(folder / "out" / "a-0.jsonl").steps if step.tool_name == "bash"]
    assert results[-1].content.startswith("42\n/workspace\n0")


def test_progress_that_nobody_reads_ends_nothing(folder: Path) -> None:
    command = f"exec {sys.executable} -m ajet rollout --tasks tasks.jsonl --out out --model {Server(answer).url}"
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet.__file__).parents[1])}
    line = f"{command} --model-name m tools=[calculator] 2>/dev/full"
    ran = subprocess.run(["/bin/sh", "-c", line], stdout=subprocess.PIPE, text=True, env=environment, check=False)
    assert ran.returncode == 0 and "mean reward  0.5000 over 2" in ran.stdout
    assert (folder / "out" / "demonstrations.jsonl").exists()


@pytest.mark.slow
@needs_bwrap
def test_ctrl_c_on_a_terminal(folder: Path) -> None:
    """What was finished stays, nothing else does, and the same command goes on."""
    held = threading.Event()
    first: list[str] = []

    def hold(path: str, body: dict[str, Any], key: str) -> Any:
        if first and not held.is_set():
            held.wait(60)
        if body["messages"][-1]["role"] == "tool":
            first.append("answered")
        return uses_bash(path, body, key)

    url = Server(hold).url
    command = [sys.executable, "-m", "ajet", "rollout", "--tasks", "tasks.jsonl", "--out", "out", "--model", url]
    command += ["--model-name", "m", "--sandbox", "bubblewrap", "--concurrency", "1", "-n", "2", "tools=[bash]"]
    environment = {"PYTHONPATH": str(Path(ajet.__file__).parents[1])}
    with Terminal(command, cwd=folder, env=environment) as terminal:
        terminal.wait_for("1/4")
        terminal.type("\x03")
        said = terminal.finish()
        assert "interrupted; the same command goes on from out" in said and "Traceback" not in said
        assert terminal.process.returncode == 130
    held.set()
    with Terminal(command, cwd=folder, env=environment) as terminal:
        said = terminal.finish()
        assert "4/4" in said and "pass@2" in said and terminal.process.returncode == 0
    assert len(first) == 4  # the finished one was not run again


def test_a_model_that_is_loaded_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout("--model", "tiny:qwen2-0.3m", "--max-tokens", "8", "--limit", "1", "max_steps=2") == 0
    assert "ended by" in capsys.readouterr().out


# ---------------------------------------------------------------- `ajet tools`


def test_tools_lists_every_ready_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools"]) == 0
    printed = capsys.readouterr().out
    named = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    assert named == get_global_tool_registry().listed() and "    answer (string): The final answer" in printed


def test_tools_prints_the_schemas_of_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text('def double(x: int) -> int:\n    """Double it."""\n    return 2 * x\n')
    assert main(["tools", "--json", "mine.py->double", "{finish: {name: done}}"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["function"]["description"] == "Double it." and second["function"]["name"] == "done"


@pytest.mark.parametrize("argument", ["calcuator", "{mcp", "missing.py->x", "{calculator: 5}"])
def test_a_wrong_tool_is_a_message(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", argument]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_list_of_tools_is_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["tools"]) == 0
    assert 50 < max(map(len, capsys.readouterr().out.splitlines())) <= 60
