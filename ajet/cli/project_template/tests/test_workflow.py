"""The workflow without a model: right answers get the full reward, other numbers part of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet import Task, WorkflowTask

sys.path.insert(0, str(Path(__file__).parent.parent))
from workflow import MyWorkflow


class AnswersWith:
    """Takes the tuner's place: its model always says the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_raw_openai_sdk_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **_request: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.text))])


@pytest.mark.parametrize(
    ("text", "reward"), [("42", 1.0), ("It is 42", 1.0), ("420", 0.5), ("No idea.", 0.0), ("", 0.0)]
)
def test_reward(text: str, reward: float) -> None:
    task = Task(main_query="What is 40 + 2?", metadata={"answer": "42"})
    tuner: Any = AnswersWith(text)
    output = asyncio.run(MyWorkflow().execute(WorkflowTask(task=task), tuner))
    assert output.reward == reward
