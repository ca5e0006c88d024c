"""`EnvironmentWorld`: the episode's environment, as a ready agent acts in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ajet.agents.world import WorldStep
from ajet.environment.environment import NOTHING_OBSERVED, observation_messages, observation_text
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.errors import AjetError, EnvironmentFault
from ajet.schema.task import Task


class EnvironmentWorld:
    """See `ajet.agents.world.World`."""

    def __init__(self, environment: LeasedEnvironment, task: Task, tools: Sequence[Mapping[str, Any]]) -> None:
        self._environment = environment
        self.tools = tools
        seen = observation_messages(environment.observation)
        # a task without messages of its own has been given the observation already
        said = list(task.init_messages) == seen
        self.beginning = "" if said else "\n\n".join(filter(None, (str(each.get("content") or "") for each in seen)))

    @classmethod
    async def of(cls, environment: LeasedEnvironment, task: Task) -> EnvironmentWorld:
        """With the tools that the environment offers, or its service describes."""
        return cls(environment, task, await environment.atools())

    async def act(self, action: str | Mapping[str, Any]) -> WorldStep:
        given = {"role": "assistant", "content": action} if isinstance(action, str) else dict(action)
        try:
            step = await self._environment.astep(given)
        except AjetError:
            raise
        except Exception as error:
            name = self._environment.record.name
            raise EnvironmentFault(f"{name}.step raised {type(error).__name__}: {error}") from error
        return WorldStep(observation_text(step.observation) or NOTHING_OBSERVED, step.reward, step.done)
