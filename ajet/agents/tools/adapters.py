"""Tools of LangChain and AgentScope as ours, and ours as theirs.

`from_langchain` and `from_agentscope` are what a YAML's `module->object` uses for such an object. `to_langchain` and
`to_agentscope` take an open `Toolset`, whose tools remember what they did until it closes, or one tool, which is opened
for each call.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, overload

from ajet.agents.tools.tool import (
    Arguments,
    StatelessTool,
    Tool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    as_text,
    plain,
)
from ajet.agents.tools.toolset import Toolset
from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command


def adapted(value: Any) -> Tool | None:
    """A tool of another library, or a class of one, as one of ours. None: it is none."""
    for base, adapt in _known():
        if isinstance(value, type) and issubclass(value, base):
            return adapt(value())
        if isinstance(value, base):
            return adapt(value)
    return None


def is_foreign(value: Any) -> bool:
    """Whether it is a tool of another library, or a class of one."""
    kind = value if isinstance(value, type) else type(value)
    return any(issubclass(kind, base) for base, _ in _known())


def _known() -> Iterator[tuple[type, Callable[[Any], Tool]]]:
    """The libraries' base classes. A library that isn't imported has made no tool."""
    for module, name, adapt in (
        ("langchain_core.tools", "BaseTool", from_langchain),
        ("agentscope.tool", "ToolBase", from_agentscope),
    ):
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type):
            yield base, adapt


# ------------------------------------------------------------ LangChain


def from_langchain(tool: Any) -> Tool:
    """A LangChain tool (`BaseTool`: what its `@tool` makes, a `StructuredTool`, …)."""
    from langchain_core.utils.function_calling import convert_to_openai_tool

    return _LangChainTool(tool, convert_to_openai_tool(tool)["function"])


class _LangChainTool(StatelessTool):
    def __init__(self, tool: Any, function: dict[str, Any]) -> None:
        self.name, self.description, self.parameters = _described(
            function["name"], function.get("description"), function.get("parameters")
        )
        self._tool = tool

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        # asked with a call's form, it says whether it failed
        call = {"type": "tool_call", "id": "1", "name": self._tool.name, "args": arguments}
        message = await self._tool.ainvoke(call)
        content = getattr(message, "content", message)
        text = _text_of(content)
        return ToolResult(text, getattr(message, "status", "success") != "error", plain(content))


@overload
def to_langchain(tool: Tool, context: ToolContext | None = None) -> Any: ...
@overload
def to_langchain(tool: Toolset, context: ToolContext | None = None) -> list[Any]: ...


def to_langchain(tool: Tool | Toolset, context: ToolContext | None = None) -> Any:
    """A LangChain tool that calls ours, or a list of them for a toolset. LangChain tells the model what fails."""
    try:
        from langchain_core.tools import StructuredTool, ToolException
    except ImportError:
        raise MissingDependencyError(f"to_langchain needs LangChain: {install_command('langchain')}") from None

    def made(schema: dict[str, Any]) -> Any:
        function = schema["function"]

        async def call(**arguments: Any) -> str:
            result = await _called(tool, context, function["name"], arguments)
            if not result.success:
                raise ToolException(result.output)
            return result.output

        return StructuredTool(
            name=function["name"],
            description=function["description"],
            args_schema=function["parameters"],
            coroutine=call,
            handle_tool_error=True,
        )

    return _each(tool, made)


# ------------------------------------------------------------ AgentScope


def from_agentscope(tool: Any) -> Tool:
    """An AgentScope tool: a `ToolBase`, or a function that its `Toolkit` would take (in 1.x, one that returns a
    `ToolResponse`)."""
    if inspect.isroutine(tool):
        from ajet.agents.tools.function_tool import FunctionTool, run_in_thread

        @functools.wraps(tool)
        async def call(*args: Any, **kwargs: Any) -> ToolResult:
            whole = inspect.iscoroutinefunction(tool) or inspect.isasyncgenfunction(tool)
            value = tool(*args, **kwargs) if whole else await run_in_thread(lambda: tool(*args, **kwargs))
            return await _blocks(await value if inspect.isawaitable(value) else value)

        return FunctionTool(call)
    if getattr(tool, "is_state_injected", False) or getattr(tool, "is_external_tool", False):
        raise ToolSetupError(f"AgentScope's tool {tool.name!r} works inside AgentScope's own agents only")
    return _AgentScopeTool(tool)


class _AgentScopeTool(StatelessTool):
    def __init__(self, tool: Any) -> None:
        self.name, self.description, self.parameters = _described(tool.name, tool.description, tool.input_schema)
        self._tool = tool

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        return await _blocks(await self._tool(**arguments))


async def _blocks(answer: Any) -> ToolResult:
    """A response, or the pieces of one, as text."""
    pieces = [piece async for piece in answer] if isinstance(answer, AsyncIterator) else [answer]
    if not all(hasattr(piece, "content") for piece in pieces):
        return ToolResult(as_text(answer), data=plain(answer))
    text = "".join(_text_of(piece.content) for piece in pieces)
    states = {str(getattr(state, "value", state)) for piece in pieces if (state := getattr(piece, "state", None))}
    return ToolResult(text or "done", not states & {"error", "denied", "interrupted"})


@overload
def to_agentscope(tool: Tool, context: ToolContext | None = None) -> Any: ...
@overload
def to_agentscope(tool: Toolset, context: ToolContext | None = None) -> list[Any]: ...


def to_agentscope(tool: Tool | Toolset, context: ToolContext | None = None) -> Any:
    """An AgentScope tool (2.x) that calls ours, or a list of them for a toolset. AgentScope need not ask anybody before
    it calls them: whoever passes them on has decided."""
    try:
        from agentscope.message import TextBlock, ToolResultState
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, ToolChunk
    except ImportError:
        raise MissingDependencyError(f"to_agentscope needs AgentScope 2: {install_command('agentscope')}") from None

    def made(schema: dict[str, Any]) -> Any:
        function = schema["function"]

        async def call(**arguments: Any) -> Any:
            result = await _called(tool, context, function["name"], arguments)
            state = ToolResultState.SUCCESS if result.success else ToolResultState.ERROR
            return ToolChunk(content=[TextBlock(text=result.output)], state=state)

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="a tool that was passed on")
        return FunctionTool(
            call,
            name=function["name"],
            description=function["description"],
            input_schema=function["parameters"],
            permission=allowed,
        )

    return _each(tool, made)


# ------------------------------------------------------------ both


def _each(tool: Tool | Toolset, made: Any) -> Any:
    if isinstance(tool, Toolset):
        return [made(schema) for schema in tool.schemas()]
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return made({"type": "function", "function": function})


async def _called(tool: Tool | Toolset, context: ToolContext | None, name: str, arguments: Arguments) -> ToolResult:
    if isinstance(tool, Toolset):
        return await tool.call(name, arguments)
    async with Toolset([tool], context) as toolset:
        return await toolset.call(name, arguments)


def _described(name: Any, description: Any, parameters: Any) -> tuple[str, str, dict[str, Any]]:
    """A name that every model takes, a description, and a schema of an object."""
    plain_name = re.sub(r"[^A-Za-z0-9_-]", "_", str(name))[:64]
    return plain_name, str(description or name), {"type": "object", "properties": {}, **(parameters or {})}


def _text_of(content: Any) -> str:
    """Content as text: of a list of blocks, their texts."""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes) and content:
        return "\n".join(_block(block) for block in content)
    return as_text(content)


def _block(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    text = block.get("text") if isinstance(block, dict) else getattr(block, "text", None)
    if isinstance(text, str):
        return text
    return f"[{kind}]" if isinstance(kind, str) else as_text(block)
