"""The Python on the pages does what the pages say."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet import Task
from ajet.backbone.plan import imitates_a_file
from ajet.config import load_config, make_config
from ajet.config.contradictions import contradictions
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.observe.metrics import aggregate_log_metrics
from ajet.schema.episode import Episode
from ajet.task_reader import build_reader
from ajet.task_runner.runtime import Runtime
from support.pages import ROOT, blocks_of
from support.synthetic_run import write_experiment


def code(page: str, mark: str) -> str:
    """The one block of the page that contains the mark."""
    found = [block.code for block in blocks_of(ROOT / "docs" / page) if mark in block.code]
    assert len(found) == 1, f"{page} has {len(found)} blocks with {mark!r}"
    return found[0]


def run_workflow(tmp_path: Path, source: str, *replies: str, **overrides: Any) -> Episode:
    """One episode of the workflow `Agent` in `source`, with scripted replies."""
    (tmp_path / "agent.py").write_text(source)
    config = make_config({"rollout.user_workflow": f"{tmp_path}/agent.py->Agent", **overrides})
    engine = ScriptedEngine(list(replies), lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    task = Task(task_id="t", main_query="What is the capital of France?", metadata={"answer": "Paris"})
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        return runtime.run(runtime.pool.run_episode(task))


def in_execute(body: str) -> str:
    """A workflow with a page's lines in its `execute`."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    head = "from ajet import Workflow, WorkflowOutput\nimport os, subprocess\n\n\nclass Agent(Workflow):\n"
    return f"{head}    name: str = 'a'\n\n    async def execute(self, workflow_task, tuner):\n{lines}"


def test_the_first_workflow_and_judge(tmp_path: Path) -> None:
    source = code("workflows.md", "class Capitals(Workflow)").replace("class Capitals", "class Agent")
    (tmp_path / "judge.py").write_text(code("judges.md", "class ExactAnswer(BaseJudge)"))
    judge = {"task_judge.judge_protocol": f"{tmp_path}/judge.py->ExactAnswer"}
    episode = run_workflow(tmp_path, source, "Paris", **judge)
    assert episode.failure is None and episode.reward == 1.0 and episode.is_success


def test_a_model_function(tmp_path: Path) -> None:
    body = "tools = []\n" + code("workflows.md", "tuner.as_model_function(agent_name")
    episode = run_workflow(tmp_path, in_execute(body + "return WorkflowOutput(reward=0.0, metadata=message)"), "42")
    assert episode.failure is None and episode.metadata == {"role": "assistant", "content": "42"}


def test_the_judge_that_returns_nothing(tmp_path: Path) -> None:
    judge = f"{tmp_path}/judge.py->ExactAnswer"
    (tmp_path / "judge.py").write_text(
        "from ajet.task_judge.base_judge import BaseJudge\n\n\nclass ExactAnswer(BaseJudge):\n"
        "    def compute_reward(self, workflow_task, workflow_output):\n        pass\n"
    )
    source = in_execute("return WorkflowOutput(metadata={})")
    episode = run_workflow(tmp_path, source, "x", **{"task_judge.judge_protocol": judge})
    assert episode.failure is not None
    assert episode.failure.message.strip() in code("judges.md", "ExactAnswer returned None").strip()


def test_rewards_of_agents_and_calls(tmp_path: Path) -> None:
    asks = 'reply = await tuner.as_raw_openai_sdk_client("checker").chat.completions.create(messages=messages)\n'
    body = 'messages = [{"role": "user", "content": "?"}]\n' + asks + code("workflows.md", "tuner.reward(0.5")
    episode = run_workflow(tmp_path, in_execute(body + "return WorkflowOutput(reward=0.0)"), "hello")
    assert episode.failure is None, episode.failure
    assert episode.agent_rewards == {"checker": 0.5} and episode.tree.calls[0].reward == 1.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_reaches_the_gateway(tmp_path: Path) -> None:
    body = code("gateway.md", "base_url, api_key, model =")
    (tmp_path / "ask.sh").write_text("set -e\n" + code("gateway.md", "curl $BASE_URL"))
    body += f"""environment = {{**os.environ, "BASE_URL": base_url, "API_KEY": api_key}}
said = subprocess.run(["bash", "{tmp_path}/ask.sh"], env=environment, capture_output=True, text=True, check=True)
return WorkflowOutput(reward=1.0, metadata={{"said": said.stdout}})
"""
    episode = run_workflow(tmp_path, in_execute(body), "42")
    assert episode.failure is None, episode.failure
    assert json.loads(episode.metadata["said"])["choices"][0]["message"]["content"] == "42"
    assert [call.agent for call in episode.tree.calls] == ["solver"]


def test_names_of_log_metrics() -> None:
    snippet = code("metrics.md", "log_metrics={")
    metrics: dict[str, Any] = eval(re.search(r"log_metrics=(\{.*\})\)", snippet)[1])  # type: ignore[index]  # noqa: S307
    names = re.search(r"^# (.*)$", snippet, re.MULTILINE)[1].split()  # type: ignore[index]
    assert sorted(aggregate_log_metrics([metrics])) == sorted(names)


def test_a_sink_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = pytest.importorskip("requests")
    posted: list[tuple[str, Any]] = []

    class Accepted:
        def raise_for_status(self) -> None:
            pass

    def post(url: str, *, json: Any, timeout: float) -> Accepted:
        posted.append((url, json))
        return Accepted()

    monkeypatch.setattr(requests, "post", post)
    monkeypatch.chdir(tmp_path)
    Path("my_sink.py").write_text(code("tracking.md", "class MySink"))
    from ajet.observe.logs import Masker
    from ajet.observe.metrics import make_sinks

    sinks = make_sinks(make_config({"trainer_common.logger": ["my_sink.py->MySink"]}), tmp_path, Masker())
    sinks.log(3, {"reward/mean": 0.5})
    sinks.close()
    assert posted == [(f"https://metrics.my-company.example/ajet/{tmp_path.name}", {"step": 3, "reward/mean": 0.5})]


def test_a_reader_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_reader.py").write_text(code("tasks.md", "class MyReader"))
    config = make_config({"task_reader.type": "my_reader.py->MyReader", "task_reader.options": {"level": 3}})
    reader = build_reader(config)
    assert reader.get_training_tasks()[7].main_query == "Level 3, problem 7"
    assert len(reader.get_validation_tasks()) == 10


def test_a_record_becomes_a_task(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(code("tasks.md", '{"id": "a-1"'))
    config = make_config({"task_reader.jsonl_dataset_file.training.file_path": str(tmp_path / "a.jsonl")})
    (task,) = build_reader(config).get_training_tasks()
    assert (task.task_id, task.main_query) == ("a-1", "What is 40 + 2?")
    assert task.metadata == {"answer": "42", "tag": "easy"}


def test_a_demonstration_is_read(tmp_path: Path) -> None:
    from ajet.backbone.local.demonstrations import read_demonstrations
    from ajet.context_tracker import Renderer

    (tmp_path / "talks.jsonl").write_text(code("imitation.md", '"messages"'))
    renderer = Renderer(ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    (episode,) = read_demonstrations(tmp_path / "talks.jsonl", renderer)
    assert episode.reward == 1.0 and len(episode.tree.calls) == 1 and episode.tree.trained_tokens > 0


def test_the_settings_of_imitation_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cold_start.yaml").write_text(code("imitation.md", "policy_loss: sft\n"))
    for name in ("agent.py", "tasks.jsonl", "talks.jsonl"):
        Path(name).touch()
    config = load_config("cold_start.yaml", ["model.path=tiny:qwen2"])
    assert imitates_a_file(config)


def test_the_settings_of_a_service() -> None:
    ajet = make_config(**yaml.safe_load(code("live_feedback.md", "wrapper_type: outside"))).ajet
    assert ajet.task_runner.outside.max_staleness == 4
    assert not list(contradictions(ajet, "local"))


def test_the_embedded_engine_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(code("dev/one_episode.md", "asyncio.run(main())"))
    runpy.run_path(str(tmp_path / "program.py"))
    assert re.fullmatch(r"(stop|length) \[[\d, ]+\] \[\(0, 0\)\]\n", capsys.readouterr().out)


def test_the_context_tracker_shows_why_a_conversation_forked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(code("dev/context_tracker.md", "describe_reasons("))
    runpy.run_path(str(tmp_path / "program.py"))
    assert capsys.readouterr().out == code("dev/context_tracker.md", "Ledger(captured=20")


def test_scripted_replies_load(tmp_path: Path) -> None:
    from ajet.engine.scripted import read_replies

    (tmp_path / "replies.yaml").write_text(code("engines.md", "# replies.yaml"))
    call, answer = read_replies(tmp_path / "replies.yaml")
    assert isinstance(call, dict) and call["tool_calls"] and answer == "The answer is \\boxed{42}."


def test_episodes_are_read_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_experiment(Path("saved_experiments"), "math_agent", steps=2)
    (tmp_path / "program.py").write_text(code("experiment_folder.md", "EpisodeStore("))
    found = runpy.run_path(str(tmp_path / "program.py"))
    assert found["recorded"].episode.reward == 1.0 and found["tree"].sampled_tokens > 0


def test_an_agent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ajet.agents import make_agent

    async def model(messages: Any, *, tools: Any = None, **_: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        function = {"name": "calculator", "arguments": '{"expression": "12 * 34"}'}
        return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    monkeypatch.chdir(tmp_path)
    address = '"http://localhost:8000/v1", "my-model"'
    Path("alone.py").write_text(code("agents.md", "asyncio.run(main())").replace(address, "MODEL"))
    runpy.run_path("alone.py", {"MODEL": model})
    assert capsys.readouterr().out == "408 answer\n"
    Path("careful.py").write_text(code("agents.md", "class CarefulAgent"))
    runpy.run_path("careful.py")
    trajectory = asyncio.run(
        make_agent("careful", {"max_steps": 4}).run_trajectory("?", lambda messages: "Final Answer: 1")
    )
    assert len(trajectory.calls) == 2


def test_a_rollout_through_the_store(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code("store.md", "memory_store() as store"), "store.md", "exec"), {})  # noqa: S102 - the page's code
    assert capsys.readouterr().out == code("store.md", "succeeded {'reward': 1.0}\n")


def test_tools_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(code("tools.md", "def weather("))
    runpy.run_path(str(tmp_path / "program.py"))
    shown = code("tools.md", "sun for 2 days\n1844")
    assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_the_program_that_trains_from_python(tmp_path: Path) -> None:
    (tmp_path / "solver.py").write_text(code("python.md", "async def solver(task, llm)"))
    command = [sys.executable, "solver.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved_experiments/solver/hf").is_dir()


@pytest.mark.slow
def test_the_program_that_evaluates_from_python(tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(code("python.md", "ajet.evaluate(echo"))
    command = [sys.executable, "measure.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2 and len(list((tmp_path / "kept").iterdir())) == 2


def test_the_trainer_with_keys_and_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.py").write_text(code("python.md", "prompt_template="))
    names = runpy.run_path(str(tmp_path / "keys.py"))
    config = names["trainer"]._config(lambda task: 1.0, ["x"], None)
    assert config.ajet.rollout.top_p == 0.95 and "prompt_template" in config.ajet.prompt_tuning.templates
