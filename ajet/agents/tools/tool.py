"""`Tool`: what an agent may call by name, with arguments that a JSON schema describes.

A tool's class holds what all episodes share; what one episode leaves behind (a working directory, an undo list) lives
in the object that `open` returns, which the episode closes. A call never raises for what the model did wrong: it
answers with a `ToolResult` that the model can act on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ajet.environment.sandboxes import Sandbox
from ajet.schema.errors import UserError

Json = Any
Arguments = dict[str, Json]


class ToolSetupError(UserError):
    """Tools that can't be made or opened as asked: unknown names, wrong options, two tools of one name."""


class ToolNameTakenError(ToolSetupError, ValueError):
    """There is a tool of this name already."""


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


@runtime_checkable
class OpenTool(Protocol):
    """A tool as one episode uses it."""

    async def call(self, arguments: Arguments) -> ToolResult:
        """`arguments` already fit the schema. An exception is answered as a failed call by the toolset."""

    async def close(self) -> None: ...


@runtime_checkable
class Tool(Protocol):
    """A tool before any episode uses it. `ajet.agents.tools.Toolset` opens, validates, calls and closes it."""

    name: str
    """Letters, digits, `_` and `-`: the key in the registry and the name in the schema alike."""
    description: str
    parameters: dict[str, Json]
    """JSON schema of the arguments (`type: object`)."""

    async def open(self, context: ToolContext) -> OpenTool: ...


@runtime_checkable
class ToolSource(Protocol):
    """Several tools whose names are known only once something is reached, such as a server."""

    async def connect(self, context: ToolContext) -> ToolConnection:
        """Reach it, for one episode. Raises `ToolSetupError`."""


class ToolConnection(Protocol):
    """What a `ToolSource` is while an episode uses it."""

    tools: Sequence[Tool]

    async def close(self) -> None: ...


class StatelessTool:
    """Base of tools that remember nothing between calls: define `run`, and say `name`, `description`, `parameters`."""

    name: str
    description: str
    parameters: dict[str, Json]
    limits_itself: bool = False
    """It ends a call that takes too long. Any tool may say so: then `Toolset` sets no other limit."""

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        """Answer one call."""
        raise NotImplementedError(f"{type(self).__name__} must define `run(self, arguments, context)`")

    async def open(self, context: ToolContext) -> OpenTool:
        return _WithContext(self, context)


@dataclass(frozen=True, slots=True)
class _WithContext:
    tool: StatelessTool
    context: ToolContext

    async def call(self, arguments: Arguments) -> ToolResult:
        return await self.tool.run(arguments, self.context)

    async def close(self) -> None:
        """There is nothing to free."""


ERROR_CHARS = 2000
"""How much of an exception's message is kept."""


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of `text`, if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text) - limit} of {len(text)} characters left out …]\n"
    head = limit // 2
    return text[:head] + note + text[len(text) - (limit - head) :]


def decode(content: bytes) -> str:
    """Output of a program as text. What isn't UTF-8 is replaced; binary data is only described."""
    if b"\0" in content[:8192]:
        return f"[{len(content)} bytes of binary data]"
    return content.decode("utf-8", errors="replace")


def as_text(value: Any) -> str:
    """What a user's tool returned, as the model reads it: text as it is, everything else as JSON."""
    if value is None:
        return "done"
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value))
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False, default=repr)
    return text.encode("utf-8", errors="replace").decode()  # half a surrogate pair can't be sent


def plain(value: Any) -> Any:
    """Pydantic models (also inside lists and dicts) as plain values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def describe_error(error: BaseException) -> str:
    """`ValueError: what it says`, even if an exception's own `__str__` raises or returns megabytes."""
    try:
        text = shorten(str(error), ERROR_CHARS)
    except Exception as awkward:  # noqa: BLE001 - a user's class may raise anything
        text = f"[a message that can't be shown: {type(awkward).__name__}]"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
