"""The helpers that old files import, against a real endpoint on this machine, and `AgentJetJob`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet import AgentJetJob, Workflow
from ajet.config import load_config
from ajet.schema.errors import ConfigError
from ajet.task_judge.helper import HelperError
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn
from ajet.utils.robust_dashscope import RobustDashScopeChatModel
from support.gateway_parts import Place, place
from support.session_parts import LineEngine

MESSAGES = [{"role": "user", "content": "Is it right?"}]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An OpenAI-compatible server whose model says `yes`."""
    started: list[Place] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with place(LineEngine("yes")) as here:
            started.append(here)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    key = started[0].key
    monkeypatch.setenv("DASHSCOPE_API_KEY", f"{key.api_key}|another")
    monkeypatch.setenv("DASHSCOPE_BASE_URL", key.base_url)
    yield started[0]
    stop.set()
    thread.join()


def test_create_external_llm_fn(endpoint: Place) -> None:
    ask = create_external_llm_fn("some-helper", 20)
    assert ask(MESSAGES) == {"role": "assistant", "content": "yes"}
    assert ask(messages=MESSAGES, custom_sampling_params={"temperature": 0.0}, request_id="r")["content"] == "yes"
    limits = [request.sampling.max_tokens for request in endpoint.engine.requests]
    assert limits == [20, 20]


def test_a_key_that_is_refused_is_said(endpoint: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "sk-wrong")
    with pytest.raises(HelperError, match="AuthenticationError"):
        create_external_llm_fn("some-helper")(MESSAGES)


def test_the_robust_model_on_several_loops(endpoint: Place) -> None:
    message = pytest.importorskip("agentscope.message")
    if not hasattr(message, "UserMsg"):
        pytest.skip("messages of AgentScope 1 are dictionaries")
    model = RobustDashScopeChatModel("some-helper", stream=False, enable_thinking=False)

    async def ask() -> Any:
        return await model([message.UserMsg("user", "Is it right?")])

    for _ in range(2):  # as judges do: a loop for each question
        reply = asyncio.run(ask())
        assert [block.text for block in reply.content] == ["yes"]


def test_the_robust_model_takes_dictionaries_of_either_agentscope(endpoint: Place) -> None:
    """As judges ask it: OpenAI's messages in, blocks that are read by key out."""
    models = pytest.importorskip("agentscope.model")

    async def ask(model: Any) -> Any:
        return await model([{"role": "system", "content": "Grade."}, *MESSAGES])

    reply = asyncio.run(ask(RobustDashScopeChatModel("some-helper", stream=False)))
    assert isinstance(reply, models.ChatResponse)
    assert "".join(block["text"] for block in reply.content if "text" in block) == "yes"


def test_dictionaries_to_agentscope_2(endpoint: Place) -> None:
    message = pytest.importorskip("agentscope.message")
    if not hasattr(message, "UserMsg"):
        pytest.skip("AgentScope 1 takes any dictionary")

    async def listen(model: Any) -> list[Any]:
        return [part async for part in await model(MESSAGES)]

    parts = asyncio.run(listen(RobustDashScopeChatModel("some-helper", stream=True)))
    assert parts[-1].content[-1]["text"] == "yes"
    model = RobustDashScopeChatModel("some-helper")
    with pytest.raises(TypeError, match=r"'tool'.*pass anything else as agentscope\.message\.Msg"):
        asyncio.run(model([{"role": "tool", "tool_call_id": "1", "content": "4"}]))


class Mine(Workflow):
    """A workflow in a file."""


def test_arguments_become_a_file_that_loads(tmp_path: Path) -> None:
    job = AgentJetJob(model="tiny:qwen2-0.3m", n_gpu=2, algorithm="rloo", batch_size=3, backbone="debug", lora_rank=4)
    job.set_workflow(Mine)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n')
    job.set_data(type="jsonl", dataset_path=str(tmp_path / "tasks.jsonl"))
    job.config.ajet.rollout.temperature = 0.5
    ajet = load_config(job.dump_job_as_yaml(tmp_path / "deep" / "job.yaml")).ajet
    assert (ajet.model.path, ajet.trainer_common.n_gpus_per_node, ajet.data.train_batch_size) == (
        "tiny:qwen2-0.3m",
        2,
        3,
    )
    assert (ajet.trainer_common.algorithm.adv_estimator, ajet.model.lora.rank, ajet.rollout.temperature) == (
        "rloo",
        4,
        0.5,
    )
    assert ajet.rollout.user_workflow == f"{Path(__file__).resolve()}->Mine"


def test_a_base_file_keeps_what_is_not_given(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("ajet: {rollout: {num_repeat: 7, temperature: 0.3}}\nmine: {size: 4}\n")
    job = AgentJetJob(base_yaml_config=base, num_repeat=2)
    config = load_config(job.dump_job_as_yaml(tmp_path / "new.yaml"), complete=False)
    assert (config.ajet.rollout.num_repeat, config.ajet.rollout.temperature, config.mine.size) == (2, 0.3, 4)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no colour"):
        AgentJetJob(colour="red")


AGENT = """
from ajet import Workflow, WorkflowOutput
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        await client.chat.completions.create(messages, max_tokens=4)
        return WorkflowOutput()

class Judge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        ask = create_external_llm_fn("some-helper")
        said = ask([{"role": "user", "content": "Is it right?"}])["content"]
        return (1.0 if said == "yes" else 0.0), said == "yes"
"""


@pytest.mark.slow
def test_a_job_runs(
    endpoint: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "6 * 7?"}\n' * 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("ajet: {task_judge: {judge_protocol: agent->Judge}}\n")
    job = AgentJetJob(
        base_yaml_config=tmp_path / "base.yaml",
        model="tiny:qwen2-0.3m",
        experiment_dir=str(tmp_path / "runs"),
        experiment_name="job",
        num_repeat=2,
    )
    job.set_workflow("agent->Agent")
    job.set_data(type="jsonl", dataset_path="tasks.jsonl")
    assert job.tune("--backbone=debug", "--json") == 0
    said = capfd.readouterr().out
    assert said.count('"reward": 1.0') >= 2 and len(endpoint.engine.requests) >= 2
