"""The world of the environment benchmark: every step is a small computation, and never the last."""

from __future__ import annotations

from typing import Any

from ajet.environment import Environment, StepResult
from ajet.schema.task import Task


class World(Environment):
    """Answers with what an agent typically sees: a few hundred characters."""

    def reset(self, task: Task) -> str:
        self.steps = 0
        return "begin"

    def step(self, action: Any) -> StepResult:
        self.steps += 1
        return StepResult(f"step {self.steps}: " + "x" * 300, reward=0.0, info={"steps": self.steps})
