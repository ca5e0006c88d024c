"""`ToolRegistry`: tools by name; `make_tools` makes those of a YAML list, those of LangChain and AgentScope among
them.

An entry is a registered name (`calculator`), a name with options (`{bash: {timeout: 20}}`), `module->object` or
`file.py->object` (a tool, a class of tools, or a function), or `{mcp: {…}}`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ajet.agents.tools.tool import (
    Arguments,
    FunctionTool,
    StatelessTool,
    Tool,
    ToolContext,
    ToolNameTakenError,
    ToolResult,
    ToolSetupError,
    ToolSource,
    arguments_of,
    as_text,
    check_name,
    plain,
    run_in_thread,
    values_of,
)
from ajet.agents.tools.toolset import Toolset
from ajet.config.kinds import TOOLS, load, nearest_name, no_option
from ajet.schema.errors import ImportPathError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.schema.user_code import ARROW, load_symbol


def adapted(value: Any) -> Tool | None:
    """A tool of another library, or a class of one, as one of ours. None: it is none. A library that isn't imported
    has made no tool."""
    kind = value if isinstance(value, type) else type(value)
    for module, name, adapt in (
        ("langchain_core.tools", "BaseTool", from_langchain),
        ("agentscope.tool", "ToolBase", from_agentscope),
    ):
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type) and issubclass(kind, base):
            return adapt(value() if value is kind else value)
    return None


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


def to_langchain(toolset: Toolset) -> list[Any]:
    """LangChain tools that call those of an open toolset. LangChain tells the model what fails."""
    try:
        from langchain_core.tools import StructuredTool, ToolException
    except ImportError:
        raise MissingDependencyError(f"to_langchain needs LangChain: {install_command('langchain')}") from None

    def made(function: dict[str, Any]) -> Any:
        async def call(**arguments: Any) -> str:
            result = await toolset.call(function["name"], arguments)
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

    return [made(schema["function"]) for schema in toolset.schemas()]


# ------------------------------------------------------------ AgentScope


def from_agentscope(tool: Any) -> Tool:
    """An AgentScope tool: a `ToolBase`, or a function that its `Toolkit` would take (in 1.x, one that returns a
    `ToolResponse`)."""
    if inspect.isroutine(tool):

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


def to_agentscope(toolset: Toolset) -> list[Any]:
    """AgentScope tools (2.x) that call those of an open toolset. AgentScope need not ask anybody before it calls them:
    the caller that passes them on has decided to allow that."""
    try:
        from agentscope.message import TextBlock, ToolResultState
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, ToolChunk
    except ImportError:
        raise MissingDependencyError(f"to_agentscope needs AgentScope 2: {install_command('agentscope')}") from None

    def made(function: dict[str, Any]) -> Any:
        async def call(**arguments: Any) -> Any:
            result = await toolset.call(function["name"], arguments)
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

    return [made(schema["function"]) for schema in toolset.schemas()]


# ------------------------------------------------------------ both


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


AnyTool = Tool | ToolSource
Maker = Callable[..., AnyTool]

NEED_OPTIONS = frozenset({"mcp", "web_fetch"})
"""The tools of ours that are nothing without options."""


class ToolRegistry:
    """Tools by name. The name is the one in the schema that the model sees, too."""

    def __init__(self) -> None:
        self._tools: dict[str, AnyTool | Maker] = {}

    def register(self, tool: Any, name: str | None = None) -> None:
        """Register a tool, a function, or a class (or function) that makes tools and takes options."""
        entry = tool if isinstance(tool, type) else as_tool(tool)
        own = name or getattr(entry, "name", None)
        if not isinstance(own, str):
            raise ToolSetupError(f"{tool!r} says no name: register_tool(tool, name=…)")
        if own in TOOLS or (own in self._tools and self._tools[own] is not entry):
            raise ToolNameTakenError(f"there is a tool {own!r} already: choose another name")
        self._tools[check_name(own)] = entry

    def unregister(self, name: str) -> None:
        """Forget a tool."""
        if name not in self._tools:
            raise ToolSetupError(f"no tool {name!r} is registered")
        del self._tools[name]

    def names(self) -> list[str]:
        """All names, those that come with ajet first."""
        return [*TOOLS, *self._tools]

    def listed(self) -> list[str]:
        """The names of those that need no options."""
        return [name for name in self.names() if name not in NEED_OPTIONS]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in TOOLS or name in self._tools

    def make(self, name: str, options: dict[str, Any] | None = None) -> AnyTool:
        """The tool of this name. Raises `ToolSetupError`."""
        if name in TOOLS:
            return _build(load(TOOLS, name), options or {}, name)
        if name not in self._tools:
            hint = nearest_name(name, self.names())
            raise ToolSetupError(f"no tool {name!r}{hint}; there are {', '.join(self.names())}, and module->object")
        made = _build(self._tools[name], options or {}, name)
        return made if not isinstance(made, Tool) or made.name == name else _Renamed(made, name)


class _Renamed:
    """A tool under the name that it was registered with, which is the one that the model sees."""

    def __init__(self, tool: Tool, name: str) -> None:
        self.name = name
        self.description = tool.description
        self.parameters = tool.parameters
        self.open = tool.open


_GLOBAL = ToolRegistry()


def get_global_tool_registry() -> ToolRegistry:
    """The registry that the YAML's names are looked up in."""
    return _GLOBAL


def register_tool(tool: Any, name: str | None = None) -> Any:
    """Register a tool for the whole process. Returns it, so that it serves as a decorator, too."""
    _GLOBAL.register(tool, name)
    return tool


def make_tools(specs: Sequence[Any], base_dirs: Sequence[str | Path] = ()) -> list[AnyTool]:
    """The tools that a YAML's `tools` list asks for. Raises `ToolSetupError` that names the entry."""
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        raise ToolSetupError(f"tools must be a list, for example [calculator, finish], not {specs!r}")
    tools: list[AnyTool] = []
    for position, spec in enumerate(specs):
        try:
            tools += _make(spec, base_dirs)
        except (ToolSetupError, ImportPathError) as error:
            raise ToolSetupError(f"tools[{position}]: {error}") from error
    names = [tool.name for tool in tools if isinstance(tool, Tool)]
    for name in names:
        if names.count(name) > 1:
            raise ToolSetupError(f"two tools are called {name!r}: give one of them another name")
    return tools


def as_tool(value: Any) -> AnyTool:
    """`value` as a tool: it is one, a class of one, a function, or a tool of LangChain or AgentScope."""
    if (foreign := adapted(value)) is not None:
        return foreign
    if isinstance(value, type):
        return _build(value, {}, value.__name__)
    if isinstance(value, Tool | ToolSource):
        return value
    if inspect.isroutine(value):
        return FunctionTool(value)
    raise ToolSetupError(
        f"{value!r:.100} is not a tool: decorate a function with @tool, or define name, description, parameters and "
        "open"
    )


def _make(spec: Any, base_dirs: Sequence[str | Path]) -> list[AnyTool]:
    if isinstance(spec, str):
        return _named(spec, None, base_dirs)
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise ToolSetupError(f"expected one name with its options, as in {{calculator: {{}}}}, not {spec!r}")
        ((name, options),) = spec.items()
        if not isinstance(options, dict | None):
            raise ToolSetupError(f"the options of {name} must be a mapping, not {options!r}")
        return _named(str(name), options or {}, base_dirs)
    return [as_tool(spec)]


def _named(name: str, options: dict[str, Any] | None, base_dirs: Sequence[str | Path]) -> list[AnyTool]:
    if ARROW not in name:
        return [_GLOBAL.make(name, options)]
    found = load_symbol(name, base_dirs)
    if isinstance(found, list | tuple):
        if options:
            raise ToolSetupError(f"{name} is a list of tools, which takes no options")
        return [as_tool(each) for each in found]
    if (foreign := adapted(found)) is not None:
        if options:
            raise ToolSetupError(f"{name} is a tool of another library, which takes no options here")
        return [foreign]
    if isinstance(found, type) or (options and inspect.isroutine(found)):  # a class or function that makes tools
        return [_build(found, options or {}, name)]
    return [_build(as_tool(found), options or {}, name)]


def _build(maker: AnyTool | Maker, options: dict[str, Any], name: str) -> AnyTool:
    """A tool as it is, or what a class or function makes with these options."""
    if not isinstance(maker, type) and isinstance(maker, Tool | ToolSource):
        if options:
            raise ToolSetupError(f"{name} takes no options, but got {', '.join(options)}")
        return maker
    model = arguments_of(maker, name).model
    known = [field.removeprefix("p_") for field in model.model_fields]
    for option in options:
        if option not in known:
            raise ToolSetupError(no_option(name, option, known))
    try:
        values = values_of(model.model_validate(options))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ToolSetupError(f"{name}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    made = maker(**values)
    if isinstance(made, type) or not isinstance(made, Tool | ToolSource):
        raise ToolSetupError(
            f"{name} made {made!r:.100}, which is not a tool: it needs name, description, parameters, open"
        )
    return made
