"""`Environment`: a world that an agent acts in, for one episode.

Subclass it and define `reset` and `step` (`def` or `async def`); `evaluate` and `close` if there is something to say or
to free. One object serves one episode at a time and never two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet.schema.errors import EnvironmentFault, RewardError
from ajet.schema.task import Task, finite_reward

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

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.reward, self.done, self.info))


class Environment:
    """The base class of environments."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that it offers to a ready agent, in OpenAI's form. A call of one arrives at `step` as a message with
    `tool_calls`."""

    @staticmethod
    def task_ids(split: str) -> Iterable[str]:
        """The ids of the tasks that a server of this environment offers in a split (`train`, `dev`, …)."""
        return []

    def reset(self, task: Task) -> Any:
        """Begin the task, and return the first observation."""
        raise NotImplementedError(f"{type(self).__name__} must define `reset(self, task)`")

    def step(self, action: Action) -> Any:
        """Act, and return a `StepResult` or the tuple (observation, reward, done, info)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, action)`")

    def evaluate(self) -> Any:
        """The whole episode's reward. None stands for the sum of the steps' rewards."""
        return None

    def close(self) -> Any:
        """Free what the episode holds. Called once, whatever happened; from another thread if a step hangs."""


def checked_step(value: Any, where: str) -> StepResult:
    """What a `step` returned, as a `StepResult` with a finite reward. Raises EnvironmentFault, which begins with
    `where`."""
    if isinstance(value, tuple) and len(value) == 4:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        raise EnvironmentFault(
            f"{where} returned {value!r:.80} of type {type(value).__name__}, "
            "not a StepResult or (observation, reward, done, info)"
        )
    done = value.done
    if getattr(done, "ndim", None) == 0 and hasattr(done, "item"):
        done = done.item()  # numpy's bool
    if not isinstance(done, bool):
        raise EnvironmentFault(f"{where} returned done={done!r:.80} of type {type(done).__name__}, not a bool")
    if not isinstance(value.info, dict):
        raise EnvironmentFault(f"{where} returned info of type {type(value.info).__name__}, not a dict")
    return StepResult(value.observation, checked_reward(value.reward, where), done, value.info)


def checked_reward(value: Any, where: str, fault: type[EnvironmentFault] = EnvironmentFault) -> float:
    """A reward from an environment as a finite float. Raises `fault`."""
    try:
        return finite_reward(float(value) if isinstance(value, bool) else value, f"the reward from {where}")
    except RewardError as error:
        raise fault(str(error)) from None
