"""The math agent in every framework: a real client, real tools, the real tracker; only the replies are scripted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.context_tracker import linear_samples
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tutorial" / "example_math_agent"
TOOL_CALL = {"content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "6*7"}}}]}


def solves(call: ScriptedCall) -> object:
    """Ask the calculator, then answer what it said."""
    if call.index == 0:
        return TOOL_CALL
    return "The answer is \\boxed{42}." if "42" in call.prompt else "The tool gave no answer."


def run_one(monkeypatch: pytest.MonkeyPatch, workflow: str) -> Episode:
    monkeypatch.chdir(ROOT)
    config = load_config(FOLDER / "math_agent.yaml", [f"rollout.user_workflow={FOLDER}/{workflow}->MathAgentWorkflow"])

    task = Task(task_id="t", main_query="What is 6 * 7?", metadata={"answer": "42"})
    engine = ScriptedEngine(solves, lambda: ModelSource.resolve(config.ajet.model.path).tokenizer())
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        return runtime.run(runtime.pool.run_episode(task))


@pytest.mark.parametrize(
    ("workflow", "needs"),
    [
        ("math_agent.py", "agentscope.permission"),
        ("math_agent_openai.py", "openai"),
        ("math_agent_langchain.py", "langchain.agents"),
        ("math_agent_http.py", "json"),
        ("math_agent_agentscope1.py", "agentscope.memory"),
    ],
)
def test_agent_calls_its_tool_and_is_recorded_as_one_conversation(
    monkeypatch: pytest.MonkeyPatch, workflow: str, needs: str
) -> None:
    top = needs.split(".")[0]
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(needs) is None:
        pytest.skip(f"{workflow} needs {needs}, which this environment does not have")
    episode = run_one(monkeypatch, workflow)
    assert episode.failure is None, episode.failure
    assert episode.reward == 1.0 and episode.is_success
    assert [call.reply.get("content") or "" for call in episode.tree.calls] == ["", "The answer is \\boxed{42}."]
    samples, _ = linear_samples(
        episode.tree, shared_token_loss="once", max_prompt_length=4096, max_response_length=4096, max_samples=9
    )
    assert len(samples) == 1, "two calls of one conversation are one training row"
    episode.ledger.balance()
    assert episode.ledger.trained == episode.ledger.captured > 0
