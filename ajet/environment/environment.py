"""`Environment`: a world that an agent acts in, for one episode.

Subclass it and define `reset` and `step` (`def` or `async def`); `evaluate` and `close` if there is something to say or
to free. One object serves one episode at a time and never two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ajet.schema.task import Task

Action = Any
"""Usually an assistant message (`{"role": "assistant", "content": …, "tool_calls": …}`) or a plain string."""
Observation = Any
"""Usually a string, a message, or a list of messages: what the agent sees next."""


@dataclass(slots=True)
class StepResult:
    """What an action led to. It also unpacks: `observation, reward, done, info = result`."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Any:
        return iter((self.observation, self.reward, self.done, self.info))


class Environment:
    """The base class of environments."""

    def reset(self, task: Task) -> Any:
        """Begin the task, and return the first observation."""
        raise NotImplementedError(f"{type(self).__name__} must define `reset(self, task)`")

    def step(self, action: Action) -> Any:
        """Act, and return a `StepResult` or the tuple (observation, reward, done, info)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, action)`")

    def evaluate(self) -> Any:
        """The whole episode's reward: the sum of the steps' rewards unless overridden (then None is never returned)."""
        return None

    def close(self) -> Any:
        """Free what the episode holds. Called once, whatever happened."""
