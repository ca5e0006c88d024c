"""What happens when a conversation fills the model's window: branches, and never a lost task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet.agents import ReActAgent, StopReason, Trajectory
from ajet.agents.run import SUMMARISE
from ajet.agents.tools import tool
from ajet.schema.trajectory import NO_CALL
from support.scripted_models import Scripted, asks, call

LONG = "x" * 3000


@tool
def read() -> str:
    """Returns a long text."""
    return LONG


def run(model: Any, prompt: Any = "The task", **settings: Any) -> Trajectory:
    agent = ReActAgent(tools=[read], context_tokens=2000, max_steps=8, **settings)
    return asyncio.run(agent.run_trajectory(prompt, model))


class Summing(Scripted):
    """Reads on, and numbers its summaries."""

    number = 0

    async def __call__(self, messages: Any, *, tools: Any = None, **sampling: Any) -> Any:
        if messages[-1]["content"] == SUMMARISE:
            assert tools and sampling["tool_choice"] == "none"
            self.number += 1
            return f"I have read it {self.number} times."
        return await super().__call__(messages, tools=tools, **sampling)


def test_old_tool_output_is_left_out() -> None:
    model = Scripted(asks(call("read")))
    trajectory = run(model)
    assert trajectory.stop_reason is StopReason.MAX_STEPS
    for request in model.requests:
        assert sum(len(message["content"]) for message in request["messages"]) < 9000
        assert request["messages"][1]["content"] == "The task"
    branches = [index for index, made in enumerate(trajectory.calls) if made.extends == NO_CALL]
    assert len(branches) > 1
    assert any("left out to make room" in message["content"] for message in trajectory.calls[branches[1]].new_messages)


def test_a_summary_takes_the_place_of_the_conversation() -> None:
    model = Summing(asks(call("read")))
    trajectory = run(model, when_full="summarise")
    summaries = [made for made in trajectory.calls if made.purpose == "summary"]
    assert summaries and trajectory.stop_reason is StopReason.MAX_STEPS
    after = trajectory.calls[trajectory.calls.index(summaries[0]) + 1]
    assert after.extends == NO_CALL
    assert [message["role"] for message in after.new_messages] == ["system", "user"]
    assert "The task" in after.new_messages[1]["content"] and "read it 1 times" in after.new_messages[1]["content"]
    assert len(model.requests) == 8  # summaries are not counted as steps


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_later_summary_takes_the_place_of_an_earlier_one_and_neither_that_of_the_task(in_parts: bool) -> None:
    model = Summing(asks(call("read")))
    task = [{"role": "user", "content": [{"type": "text", "text": "The task"}]}]
    trajectory = run(model, task if in_parts else "The task", when_full="summarise")
    assert model.number > 1
    branch = [made for made in trajectory.calls if made.extends == NO_CALL][-1]
    begun = str(branch.new_messages[-1]["content"])
    assert "The task" in begun and f"read it {model.number} times" in begun
    assert "read it 1 times" not in begun and begun.count("What has been done so far") == 1


@pytest.mark.parametrize(
    ("summary", "reason"),
    [
        ({"content": ""}, StopReason.CONTEXT_FULL),
        ({"content": "<think>What was it?</think>"}, StopReason.CONTEXT_FULL),
        ({"content": None, "refusal": "I can't help with that."}, StopReason.REFUSED),
    ],
)
def test_what_is_no_summary_takes_the_place_of_nothing(summary: dict[str, Any], reason: StopReason) -> None:
    async def model(messages: Any, *, tools: Any = None, **sampling: Any) -> Any:
        return summary if messages[-1]["content"] == SUMMARISE else asks(call("read"))

    trajectory = run(model, when_full="summarise")
    assert trajectory.stop_reason is reason
    assert [made.extends for made in trajectory.calls].count(NO_CALL) == 1  # nothing was begun anew


@pytest.mark.parametrize("when_full", ["stop", "drop"])
def test_a_conversation_that_cannot_be_made_shorter(when_full: Any) -> None:
    agent = ReActAgent(context_tokens=100, when_full=when_full)
    trajectory = asyncio.run(agent.run_trajectory(LONG, Scripted("ok")))
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL and not trajectory.calls
