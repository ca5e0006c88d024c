"""`Tool`: what an agent may call by name, with arguments that a JSON schema describes.

A tool's class holds what all episodes share; what one episode leaves behind (a working directory, an undo list) lives
in the object that `open` returns, which the episode closes. A call never raises for what the model did wrong: it
answers with a `ToolResult` that the model can act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ajet.sandbox.sandbox import Sandbox

Json = Any
Arguments = dict[str, Json]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one tool call."""

    output: str
    """What the model is shown, already cut to the tool's limit."""
    success: bool = True
    """False: the model's call failed, and `output` says why and what to do."""
    data: Json = None
    """The same as values, for programs."""
    reward: float | None = None
    """Added to the reward of the model call that asked for it."""
    ends_episode: bool = False
    """The agent is done: `finish`, `submit`."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What an episode lends its tools."""

    sandbox: Sandbox | None = None
    episode_id: str = ""
    workflow_task: Any = None
    """The `WorkflowTask`, if the agent runs in an episode."""


class OpenTool(Protocol):
    """A tool as one episode uses it."""

    async def call(self, arguments: Arguments) -> ToolResult:
        """`arguments` already fit the schema. An exception is answered as a failed call by the toolset."""

    async def close(self) -> None: ...


class Tool(Protocol):
    """A tool before any episode uses it. `ajet.tools.Toolset` opens, validates, calls and closes it."""

    name: str
    """Letters, digits, `_` and `-`: the key in the registry and the name in the schema alike."""
    description: str
    parameters: dict[str, Json]
    """JSON schema of the arguments (`type: object`)."""

    async def open(self, context: ToolContext) -> OpenTool: ...
