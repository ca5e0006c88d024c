"""The agent without a model, and what its answers are worth."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet import Task, WorkflowOutput, WorkflowTask
from ajet.agents import ReActAgent

sys.path.insert(0, str(Path(__file__).parent.parent))
from judge import Judge


async def model(messages: list[dict[str, Any]], *, tools: Any = None, **_sampling: Any) -> Any:
    """Takes the model's place: asks the calculator, then says what came back."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    function = {"name": "calculator", "arguments": json.dumps({"expression": "40 + 2"})}
    return {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_agent() -> None:
    agent = ReActAgent(tools=["calculator"], max_steps=4)
    trajectory = asyncio.run(agent.run_trajectory("What is 40 + 2?", model))
    assert trajectory.final_response == "42"


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("It is 42", 1.0), ("420", 0.5), ("No idea.", 0.0)])
def test_reward(answer: str, reward: float) -> None:
    config: Any = None
    task = Task(main_query="What is 40 + 2?", metadata={"answer": "42"})
    output = WorkflowOutput(metadata={"final_answer": answer})
    assert Judge(config).compute_reward(WorkflowTask(task=task), output)[0] == reward
