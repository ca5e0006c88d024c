"""`rollout.agent` and `rollout.environment` together: the agent acts in the environment, which gives the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.agents.run import OneAtATime, world_tools
from ajet.agents.tools import ToolResult, Toolset
from ajet.agents.tools.tool import ToolSetupError
from ajet.engine.scripted import Reply
from ajet.environment import StepResult
from ajet.environment.environment import EnvironmentSettings
from ajet.environment.server import EnvironmentServer
from ajet.environment.service_environment import described_tools
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task
from support.runner_fakes import played

LAKE = {
    "class": "gymnasium:FrozenLake-v1",
    "options": {"is_slippery": False, "action_names": ["left", "down", "right", "up"]},
}
WAY = ["down", "down", "right", "right", "down", "right"]
SHOP = """
from ajet.environment import Environment, StepResult

def function(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}

class Shop(Environment):
    tools = [function("look"), function("buy", item={"type": "string"})]

    def reset(self, task):
        self.seen = 0
        parts = [{"type": "text", "text": text} for text in ("Look around.", "Buy tea.")]
        return {"role": "user", "content": parts}

    def step(self, action):
        calls = action.get("tool_calls") or []
        if not calls:
            return StepResult("Nobody answers to: " + action["content"], -0.25)
        asked = calls[0]["function"]
        if asked["name"] == "look":
            self.seen += 1
            return StepResult("There is tea and salt.")
        if "bomb" in asked["arguments"]:
            raise ValueError("the shop is gone")
        return StepResult("Sold.", 1.0 if "tea" in asked["arguments"] else 0.0, True)
"""


def asks(*calls: tuple[str, dict[str, Any]]) -> Reply:
    return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": given}} for name, given in calls]}


def run(replies: Sequence[Reply], agent: dict[str, Any], environment: Any, task: Task | None = None) -> Episode:
    settings = {"rollout.agent": agent, "rollout.environment": environment}
    return played(settings, replies, task or Task(task_id="3", main_query=""))


def test_what_the_agent_says_is_its_action() -> None:
    pytest.importorskip("gymnasium")
    episode = run(["fly", *WAY], {"type": "react", "max_steps": 20}, LAKE)
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 1.0)
    assert episode.metadata["stop_reason"] == "environment"
    assert [call.extends for call in episode.tree.calls] == [-1, 0, 1, 2, 3, 4, 5]  # one conversation
    assert episode.environment is not None
    assert [event.what for event in episode.environment.events] == ["reset", *["step"] * 7, "evaluate", "close"]
    assert episode.tree.trained_tokens == episode.tree.sampled_tokens


@pytest.mark.slow
def test_an_agent_that_only_calls_tools() -> None:
    pytest.importorskip("gymnasium")
    replies: list[Reply] = [asks(("act", {"action": step})) for step in WAY]
    episode = run(["I go down.", *replies], {"type": "tool", "max_steps": 20}, LAKE)
    assert episode.failure is None, episode.failure
    assert (episode.reward, episode.metadata["stop_reason"]) == (1.0, "tool")
    drowned = run([asks(("act", {"action": step})) for step in ("down", "right")], {"type": "tool"}, LAKE)
    assert drowned.reward == 0.0


def test_limits_hold() -> None:
    pytest.importorskip("gymnasium")
    episode = run(["up"], {"type": "react", "max_steps": 3}, LAKE)
    assert (episode.reward, episode.metadata["stop_reason"], len(episode.tree.calls)) == (0.0, "max_steps", 3)


def test_tools_that_the_environment_offers(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    shop = f"{tmp_path}/shop.py->Shop"
    replies: list[Reply] = [asks(("look", {})), "Hello?", asks(("buy", {})), asks(("buy", {"item": "tea"}))]
    episode = run(replies, {"type": "react", "tools": ["calculator"]}, shop)
    assert episode.failure is None, episode.failure
    assert episode.reward == 0.75 and episode.log_metrics["agent/failed_tool_calls"] == 1
    # of two actions in one reply, the second comes too late
    both = run([asks(("buy", {"item": "tea"}), ("buy", {"item": "tea"}))], {"type": "react"}, shop)
    assert (both.reward, both.metadata["stop_reason"]) == (1.0, "tool")
    assert both.environment is not None
    assert [event.what for event in both.environment.events].count("step") == 1


def test_a_task_with_words_of_its_own_is_told_before_the_observation(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    messages = [{"role": "user", "content": "You are thrifty."}]
    task = Task(task_id="t", main_query="", init_messages=messages)
    episode = run([asks(("buy", {"item": "tea"}))], {"type": "react"}, f"{tmp_path}/shop.py->Shop", task)
    prompt = [message["content"] for message in episode.tree.calls[0].new_messages]
    assert prompt[-2:] == ["You are thrifty.", "Look around.\nBuy tea."]


def test_an_environment_that_raises_is_no_tool_that_failed(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    episode = run([asks(("buy", {"item": "bomb"}))], {"type": "react"}, f"{tmp_path}/shop.py->Shop")
    assert episode.status == EpisodeStatus.WORKFLOW_ERROR and len(episode.tree.calls) == 1
    assert episode.failure is not None and "ValueError: the shop is gone" in episode.failure.message


@pytest.mark.parametrize("agent", ["react", "tool"])
def test_an_environment_that_exits_ends_its_episode_whoever_acts(tmp_path: Path, agent: str) -> None:
    (tmp_path / "shop.py").write_text(SHOP.replace('ValueError("the shop is gone")', "SystemExit(3)"))
    episode = run([asks(("buy", {"item": "bomb"}))], {"type": agent}, f"{tmp_path}/shop.py->Shop")
    assert (episode.status, len(episode.tree.calls)) == (EpisodeStatus.WORKFLOW_ERROR, 1)
    assert episode.failure is not None and "Shop.step raised SystemExit: 3" in episode.failure.message


def test_a_step_may_take_longer_than_a_tool() -> None:
    class Slow:
        tools, beginning = (), ""

        async def act(self, action: Any) -> StepResult:
            await asyncio.sleep(0.2)
            return StepResult("seen", 1.0, False)

    async def play() -> ToolResult:
        async with Toolset(world_tools(OneAtATime(Slow()), only_tools=True), call_seconds=0.01) as toolset:
            return await toolset.call("act", {"action": "go"})

    assert asyncio.run(play()).output == "seen"


@pytest.mark.parametrize("told", ["create", "get_info", "words"])
def test_tools_that_a_service_describes(tmp_path: Path, told: str) -> None:
    """Our server names them when it creates the instance; another may do so by `/get_info`, or in words only."""
    (tmp_path / "shop.py").write_text(SHOP)
    if told != "create":
        hidden = SHOP.replace("    tools = [", "    listed = [")
        answer = "{'tools': self.listed}" if told == "get_info" else "'You may look, and buy things.'"
        (tmp_path / "shop.py").write_text(f"{hidden}\n    def get_info(self):\n        return {answer}\n")

    async def play() -> Episode:
        server = EnvironmentServer(EnvironmentSettings(source=f"{tmp_path}/shop.py->Shop"))
        await server.start()
        try:
            url = f"http://127.0.0.1:{server.address.port}"
            replies: list[Reply] = [asks(("look", {})), asks(("buy", {"item": "tea"}))]
            return await asyncio.to_thread(run, replies, {"type": "react", "max_steps": 2}, {"url": url})
        finally:
            await server.aclose()

    episode = asyncio.run(play())
    assert episode.failure is None, episode.failure
    offered = [tool["function"]["name"] for tools in episode.tree.toolsets for tool in tools]
    assert episode.environment is not None
    if told == "words":
        assert offered == [] and episode.reward == -0.5  # two calls to nobody
    else:
        assert offered == ["look", "buy"] and episode.reward == 1.0
        assert [event.what for event in episode.environment.events] == ["reset", "step", "step", "evaluate", "close"]


def test_a_service_that_lies_about_its_tools_is_named() -> None:
    described = described_tools({"tools": [{"name": "look", "parameters": "none"}, 3, {"title": "x"}]})
    assert [each["name"] for each in described] == ["look"]
    with pytest.raises(ToolSetupError, match="OpenAI's"):
        world_tools(OneAtATime(SimpleNamespace(tools=described)), only_tools=False)  # type: ignore[arg-type]
    assert described_tools("look: looks") == described_tools({"tools": "look"}) == described_tools(None) == ()
