"""The agents that bring their own clients, and the debate: real clients, real programs; only replies are scripted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.context_tracker import linear_samples
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.schema.episode import CallTree, Episode
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tutorial"
TOOL_CALL = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"numbers": [40, 2]}}}]}


def adds(call: ScriptedCall) -> object:
    return TOOL_CALL if call.index == 0 else "It is \\boxed{42}." if "42" in call.prompt else "No answer came."


def run_one(monkeypatch: pytest.MonkeyPatch, conf: str, replies: object, *overrides: str) -> Episode:
    monkeypatch.chdir(ROOT)
    config = load_config(TUTORIAL / conf, overrides)
    task = Task(task_id="t", main_query="What is 40 + 2?", metadata={"answer": "42"})
    engine = ScriptedEngine(replies, lambda: ModelSource.resolve(config.ajet.model.path).tokenizer())  # type: ignore[arg-type]
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        episode = runtime.run(runtime.pool.run_episode(task))
    assert episode.failure is None, episode.failure
    assert episode.reward == 1.0
    return episode


def rows(tree: CallTree) -> int:
    samples, _ = linear_samples(tree, max_prompt_length=4096, max_response_length=4096, max_samples=9)
    return len(samples)


def test_anthropics_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = run_one(monkeypatch, "example_other_clients/agents.yaml", adds)
    assert len(episode.tree.calls) == 2 and rows(episode.tree) == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = TUTORIAL / "example_other_clients" / "program_agent.py->ShellAgentWorkflow"
    episode = run_one(
        monkeypatch,
        "example_other_clients/agents.yaml",
        ["40 and 2, so", "\\boxed{42}"],
        f"rollout.user_workflow={workflow}",
    )
    assert len(episode.tree.calls) == 2 and rows(episode.tree) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="Node.js is not installed")
def test_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("agent.mjs", "package.json"):
        shutil.copy(TUTORIAL / "example_other_clients" / name, tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"npm's registry can't be reached: {installed.stderr[-200:]}")
    workflow = TUTORIAL / "example_other_clients" / "program_agent.py->NodeAgentWorkflow"
    episode = run_one(
        monkeypatch,
        "example_other_clients/agents.yaml",
        adds,
        f"rollout.user_workflow={workflow}",
        f"user.node_folder={tmp_path}",
    )
    assert len(episode.tree.calls) == 2 and rows(episode.tree) == 1


def test_debate_trains_two_roles_and_not_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ["40 + 2 is 41.", "40 + 2 is not 41.", "Then 42.", "No mistake.", "\\boxed{42}"]
    episode = run_one(monkeypatch, "example_multi_agent/debate.yaml", replies)
    calls = episode.tree.calls
    assert [call.agent for call in calls] == ["solver", "checker", "solver", "checker", "referee"]
    assert [bool(call.mask.any()) for call in calls] == [True] * 4 + [False]
    assert [call.turn for call in calls] == [0, 0, 1, 1, 0]
    assert rows(episode.tree) == 2
    assert episode.ledger.masked == {"not_trainable": len(calls[-1].logprobs)}
