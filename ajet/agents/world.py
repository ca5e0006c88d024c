"""`World`: what an agent acts in besides its tools, for one run: an environment.

What the agent says is an action, and what comes of it is what it is told next, until the world says that it is over. A
world may offer tools of its own: a call of one is an action, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ajet.agents.tools.function_tool import check_name
from ajet.agents.tools.tool import Arguments, StatelessTool, Tool, ToolContext, ToolResult, ToolSetupError

ACT = {
    "name": "act",
    "description": "Act in the environment, and see what comes of it.",
    "parameters": {
        "type": "object",
        "properties": {"action": {"type": "string", "description": "The action, as the task describes it"}},
        "required": ["action"],
        "additionalProperties": False,
    },
}
"""For agents that may only call tools, in worlds that offer none."""


@dataclass(frozen=True, slots=True)
class WorldStep:
    """What an action led to."""

    observation: str
    reward: float = 0.0
    done: bool = False


class World(Protocol):
    """One run's world, which has begun already."""

    @property
    def beginning(self) -> str:
        """What the agent is told after its task. Empty: the task says it."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that it offers, in OpenAI's form."""

    async def act(self, action: str | Mapping[str, Any]) -> WorldStep:
        """A text, or a message with `tool_calls`."""


class OneAtATime:
    """A world in which calls of one reply act one after the other, and not beyond the end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done = False
        self._free = asyncio.Lock()

    async def act(self, action: str | Mapping[str, Any]) -> WorldStep | None:
        """None: it is over."""
        async with self._free:
            if self.done:
                return None
            step = await self.world.act(action)
            self.done = step.done
            return step


def world_tools(world: OneAtATime, *, only_tools: bool) -> list[Tool]:
    """The tools by which an agent acts. `only_tools`: it has no other way."""
    tools: list[Tool] = []
    for schema in world.world.tools:
        function = schema.get("function", schema)
        well_formed = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not well_formed or not isinstance(function.get("parameters") or {}, Mapping):
            raise ToolSetupError(f"the environment's `tools` should have the form of OpenAI's, not {schema!r:.200}")
        tools.append(_WorldTool(world, function))
    return tools or ([_Act(world)] if only_tools else [])


class _WorldTool(StatelessTool):
    """A tool that the world offers."""

    def __init__(self, world: OneAtATime, function: Mapping[str, Any]) -> None:
        self.name = check_name(function["name"])
        self.description = str(function.get("description") or self.name)
        self.parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        self._world = world
        self._calls = 0

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        step = await self._world.act(self.action(arguments))
        if step is None:
            return ToolResult("Not executed: the episode is over.", success=False)
        return ToolResult(step.observation, ends_episode=step.done, data={"reward": step.reward})

    def action(self, arguments: Arguments) -> str | Mapping[str, Any]:
        """The call as a message."""
        self._calls += 1
        function = {"name": self.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"{self.name}-{self._calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class _Act(_WorldTool):
    """The one tool of worlds that offer none."""

    def __init__(self, world: OneAtATime) -> None:
        super().__init__(world, ACT)

    def action(self, arguments: Arguments) -> str | Mapping[str, Any]:
        return str(arguments["action"])
