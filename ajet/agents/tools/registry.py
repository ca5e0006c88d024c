"""`ToolRegistry`: tools by name, and `make_tools`, which turns the entries of a YAML list into tools.

An entry is a registered name (`calculator`), a name with options (`{bash: {timeout: 20}}`), `module->object` or
`file.py->object` (a tool, a class of tools, or a function), or `{mcp: {…}}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ajet.agents.tools.adapters import adapted, is_foreign
from ajet.agents.tools.function_tool import FunctionTool, arguments_of, check_name, values_of
from ajet.agents.tools.tool import Tool, ToolSetupError, ToolSource
from ajet.config.kinds import TOOLS, load, nearest_name
from ajet.schema.errors import ImportPathError
from ajet.schema.user_code import ARROW, load_symbol

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
            raise ToolSetupError(f"there is a tool {own!r} already: choose another name")
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
    if isinstance(value, type) and not is_foreign(value):
        return _build(value, {}, value.__name__)
    if isinstance(value, Tool | ToolSource):
        return value
    foreign = adapted(value)
    if foreign is not None:
        return foreign
    if inspect.isroutine(value):
        return FunctionTool(value)
    raise ToolSetupError(
        f"{value!r:.100} is no tool: decorate a function with @tool, or define name, description, parameters and open"
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
    if is_foreign(found):
        if options:
            raise ToolSetupError(f"{name} is a tool of another library, which takes no options here")
        return [as_tool(found)]
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
            near = get_close_matches(str(option), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(known) or 'none'}"
            raise ToolSetupError(f"{name} has no option {option!r}; {hint}")
    try:
        values = values_of(model.model_validate(options))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ToolSetupError(f"{name}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    made = maker(**values)
    if isinstance(made, type) or not isinstance(made, Tool | ToolSource):
        raise ToolSetupError(
            f"{name} made {made!r:.100}, which is no tool: it needs name, description, parameters, open"
        )
    return made
