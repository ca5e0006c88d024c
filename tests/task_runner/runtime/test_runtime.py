"""What a run checks before its first episode, and how it stops what it has started."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from ajet.config import load_config, make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.schema.errors import ConfigError, ImportPathError
from ajet.task_runner import runtime as module
from ajet.task_runner.environments import load_workflow
from ajet.task_runner.external_episodes import KEY_VARIABLE
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.runtime import Runtime
from support.ports import free_port

YAML = """
ajet:
  model: {path: tiny:qwen2-0.3m}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout: {user_workflow: agent.py->Agent}
  helper: {model: some-model}
"""


def test_a_helper_without_an_endpoint_ends_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "agent.py").write_text("raise AssertionError('not even imported')\n")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    (tmp_path / "conf.yaml").write_text(YAML)
    runtime = Runtime(load_config(tmp_path / "conf.yaml"))
    with pytest.raises(ConfigError, match=r"some-model.*ajet.helper.base_url"):
        runtime.start()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def __init__(self): super().__init__()", "unexpected keyword argument 'name'"),
        ("size: int", "missing a required argument: 'size'"),
        ("def __init__(self, **fields): super().__init__(**fields)", ""),
    ],
)
def test_a_workflow_that_no_episode_could_make_is_refused(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "made.py").write_text(
        f"from ajet import Workflow\nclass Made(Workflow):\n    {body}\n"
        "    async def execute(self, workflow_task, tuner): ...\n"
    )
    config = make_config({"rollout.user_workflow": f"{tmp_path}/made.py->Made"})
    with pytest.raises(ImportPathError, match=says) if says else nullcontext():
        assert load_workflow(config)(name="").name == "Made"


class SlowToEnd(ScriptedEngine):
    """Its servers take longer to end than one stage of stopping may, as vLLM's do on a busy machine."""

    ended = False

    async def aclose(self) -> None:
        await asyncio.sleep(1.25)
        self.ended = True


def test_an_engine_has_the_time_to_end_that_the_episodes_left_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers that are killed leave their shared memory behind."""
    monkeypatch.setattr(module, "STOP_S", 1.0)
    engine = SlowToEnd(["hi"], lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    with Runtime(make_config({"rollout.agent": {"type": "react"}}), make_engine=lambda _: engine) as runtime:
        runtime._loader.loaded.result()
    assert engine.ended
    assert "did not end" not in caplog.text


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_workflow_that_cannot_be_imported_leaves_no_engine(tmp_path: Path, seconds: int) -> None:
    """It fails before the tokenizer is there, or after: a notebook would keep the weights in memory."""
    (tmp_path / "agent.py").write_text(f"import time\ntime.sleep({seconds})\nimport nowhere\n")
    made: list[object] = []

    def make(_: object) -> ScriptedEngine:
        made.append(engine := ScriptedEngine(["hi"], lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()))
        return engine

    runtime = Runtime(make_config({"rollout.user_workflow": f"{tmp_path}/agent.py->Agent"}), make_engine=make)
    with pytest.raises(ImportPathError):
        runtime.start()
    with pytest.raises(ConfigError, match="was stopped"):
        runtime.model()
    assert not made


def test_what_ends_the_run_at_its_start_ends_the_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("no such rubric")

    monkeypatch.setattr(module, "load_judge", refused)
    (tmp_path / "agent.py").write_text("")
    keys = {"task_runner.wrapper_type": "multi-processing", "task_judge.judge_type": "rubrics_auto_grader"}
    runtime = Runtime(make_config({"rollout.user_workflow": f"{tmp_path}/agent.py->Agent", **keys}))
    with pytest.raises(ConfigError, match="no such rubric"):
        runtime.start()
    assert isinstance(runtime.attempts, ProcessRunner)
    assert runtime.attempts.workers._server._process.poll() is not None


def test_a_service_that_waits_for_its_trainer_connects_once_episodes_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the judge is loaded, it would be told that there is no such path."""
    port = free_port()

    def slow(*_: object) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()

    monkeypatch.setenv(KEY_VARIABLE, "sk-ajet-the-service")
    monkeypatch.setattr(module, "load_judge", slow)
    engine = ScriptedEngine(["hi"], lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    keys = {"task_runner.wrapper_type": "outside", "gateway.port": port}
    with Runtime(make_config(keys), make_engine=lambda _: engine):
        socket.create_connection(("127.0.0.1", port)).close()
