"""The agentic-rollout library's tool API on top of our tools: instances are created, called and released by id.

`create_tool` returns a tool that works both ways: an agent opens it for a run, or a program calls it without an agent.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ajet.agents.tools import (
    FunctionTool,
    OpenTool,
    Tool,
    ToolContext,
    Toolset,
    ToolSource,
    get_global_tool_registry,
    tool_schema,
)
from ajet.agents.tools import ToolResult as _OurResult

FORMER_NAMES = {"bashexecutor": "bash", "bash_executor": "bash", "fileeditor": "file_editor"}
"""Our tools by the library's names, in lower case. The others have the same name here."""
SCHEMA_NAMES = {"bashexecutor": "bash_executor", "fileeditor": "file_editor"}
"""What the library's models saw in place of the names of its classes, in lower case."""
WITHOUT_EFFECT = frozenset({"precision", "debug", "execution_mode", "enable_linting", "capture_output"})
"""Settings of the library's tools that have no effect here. All others must be settings of our tools."""


@dataclass
class ToolResult:
    """The answer to a call, under the library's field names."""

    success: bool = True
    result: Any = None
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    reward_score: float = 0.0


class ToolCallInfo(NamedTuple):
    """A call for `ToolRegistry.execute_tool_call`."""

    tool_name: str
    instance_id: str
    parameters: dict[str, Any]
    call_id: str = ""


class BaseAgenticTool:
    """Derive from it and define `get_openai_tool_schema` and `async execute_tool(instance_id, parameters)`."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self.config = {**(config or {}), **more}
        self.tool_schema = tool_schema
        self.instances: set[str] = set()

    def get_openai_tool_schema(self) -> Any:
        if self.tool_schema is None:
            raise NotImplementedError(f"{type(self).__name__} must define `get_openai_tool_schema(self)`")
        return self.tool_schema

    async def execute_tool(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} must define `async execute_tool(self, instance_id, parameters)`"
        )

    async def create_instance(self, instance_id: str | None = None, **more: Any) -> str:
        made = instance_id or uuid.uuid4().hex
        self.instances.add(made)
        await _called(getattr(self, "_initialize_instance", None), made)
        return made

    async def release_instance(self, instance_id: str) -> None:
        if instance_id in self.instances:
            self.instances.discard(instance_id)
            await _called(getattr(self, "_cleanup_instance", None), instance_id)

    async def calculate_reward(self, instance_id: str, **more: Any) -> float:
        return 0.0

    def get_description(self) -> str:
        return json.dumps(_function(self.get_openai_tool_schema()), ensure_ascii=False)

    def validate_parameters(self, parameters: Mapping[str, Any]) -> bool:
        """Whether all required parameters are present."""
        required = _function(self.get_openai_tool_schema()).get("parameters", {}).get("required") or ()
        return all(name in parameters for name in required)


class SimpleAgenticTool(BaseAgenticTool):
    """Derive from it and define `async def simple_execute(self, parameters)`."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any] | None = None,
        required: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, create_openai_tool_schema(name, description, parameters or {}, required))
        self.name, self.description = name, description
        self.parameters: dict[str, Any] = _function(self.tool_schema)["parameters"]

    async def simple_execute(self, parameters: dict[str, Any]) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define `async def simple_execute(self, parameters)`")

    async def execute_tool(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> ToolResult:
        if not self.validate_parameters(parameters):
            missing = [name for name in self.parameters["required"] if name not in parameters]
            return ToolResult(False, error=f"missing: {', '.join(missing)}")
        try:
            return _former(await self.simple_execute(parameters))
        except Exception as error:  # noqa: BLE001 - the tool is the user's, and the library never raised here
            return ToolResult(False, error=f"{type(error).__name__}: {error}")

    async def open(self, context: ToolContext) -> OpenTool:
        return await _FormerTool(self, self.name).open(context)


class OurTool(BaseAgenticTool):
    """One of our tools with the library's methods added."""

    def __init__(self, tool: Tool, name: str) -> None:
        """`name`: the one that the model sees."""
        schema = tool_schema(tool)
        super().__init__(None, {**schema, "function": {**schema["function"], "name": name}})
        self.name, self.description, self.parameters = name, tool.description, tool.parameters
        self._tool = tool
        self._open: dict[str, Toolset] = {}

    async def open(self, context: ToolContext) -> OpenTool:
        return await self._tool.open(context)

    async def create_instance(self, instance_id: str | None = None, **more: Any) -> str:
        """`context=`: a `ToolContext`, for tools that need a sandbox."""
        made = await super().create_instance(instance_id)
        self._open[made] = await Toolset([self._tool], more.get("context") or ToolContext(episode_id=made)).__aenter__()
        return made

    async def release_instance(self, instance_id: str) -> None:
        await super().release_instance(instance_id)
        opened = self._open.pop(instance_id, None)
        if opened is not None:
            await opened.__aexit__()

    async def execute_tool(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> ToolResult:
        if instance_id not in self._open:
            raise ValueError(f"{self.name} has no instance {instance_id!r}: create_instance makes one")
        if self._tool.name != "calculator":
            return _former(await self._open[instance_id].call(self._tool.name, parameters))
        expression = _expression(parameters)
        answer = await self._open[instance_id].call("calculator", {"expression": expression})
        value, shown = answer.data, answer.output
        kind = "expression_evaluation" if "expression" in parameters else str(parameters.get("operation", "operation"))
        known = {"result": value, "formatted_result": shown, "calculation_type": kind}
        return _former(replace(answer, data=known if answer.success else None))

    def named(self, name: str) -> OurTool:
        """The same tool under another name."""
        return OurTool(self._tool, name)


_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "power": "**"}
_OVER = {"average": "mean", "mean": "mean", "median": "median", "sum": "sum", "min": "min", "max": "max"}


def _expression(parameters: Mapping[str, Any]) -> str:
    """The library calculator's arguments as an expression."""
    if "expression" in parameters:
        return str(parameters["expression"])
    operation, numbers = str(parameters.get("operation", "")), parameters.get("numbers")

    def first(*keys: str) -> Any:
        return next((parameters[key] for key in keys if key in parameters), None)

    a, b, one = first("a", "base"), first("b", "exponent"), first("n", "a", "number", "angle")
    if numbers and operation in _SIGNS:
        return f" {_SIGNS[operation]} ".join(f"({number})" for number in numbers)
    if numbers:
        return f"{_OVER.get(operation or 'average', operation)}({list(numbers)})"
    if a is not None and b is not None:
        return f"({a}) {_SIGNS.get(operation or 'add', operation)} ({b})"
    if operation == "log" and "base" in parameters:
        return f"log({one}, {parameters['base']})"
    if str(parameters.get("unit", "")).startswith("deg"):
        return f"{operation}(radians({one}))"
    return f"{operation}({one})" if operation else str(one)


class ToolRegistry:
    """Tools by name, and their instances by id."""

    def __init__(self) -> None:
        self._tools: dict[str, Any] = {}
        self._instances: dict[str, str] = {}

    def register_tool(self, tool: Any, config: Mapping[str, Any] | None = None, name: str | None = None) -> None:
        """A class of tools, made with `config`."""
        self.register_tool_instance(tool(config) if config is not None else tool(), name)

    def register_tool_instance(self, tool: Any, name: str | None = None) -> None:
        self._tools[name or str(_function(tool.get_openai_tool_schema())["name"])] = tool

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def get_tool_schema(self, name: str) -> Any:
        return self._named(name).get_openai_tool_schema()

    def get_tool_schemas(self) -> list[Any]:
        return [tool.get_openai_tool_schema() for tool in self._tools.values()]

    def get_tool_info(self, name: str) -> dict[str, Any]:
        active = [made for made, owner in self._instances.items() if owner == name]
        return {"name": name, "schema": self.get_tool_schema(name), "active_instances": len(active)}

    def clear_registry(self) -> None:
        self._tools.clear()

    async def create_tool_instance(self, name: str, instance_id: str | None = None, **more: Any) -> str:
        made = str(await self._named(name).create_instance(instance_id, **more))
        self._instances[made] = name
        return made

    async def execute_tool(self, name: str, instance_id: str, parameters: dict[str, Any], **more: Any) -> ToolResult:
        tool = self._named(name)
        if self._instances.get(instance_id) != name:
            raise ValueError(f"{name} has no instance {instance_id!r}")
        if isinstance(tool, BaseAgenticTool) and not tool.validate_parameters(parameters):
            return ToolResult(False, error="a required parameter is missing")
        try:
            return _former(await _called(tool.execute_tool, instance_id, parameters, **more))
        except Exception as error:  # noqa: BLE001 - the tool is the user's, and the library never raised here
            return ToolResult(False, error=f"{type(error).__name__}: {error}")

    async def execute_tool_call(self, call: ToolCallInfo) -> ToolResult:
        return await self.execute_tool(call.tool_name, call.instance_id, call.parameters)

    async def calculate_tool_reward(self, name: str, instance_id: str) -> float:
        return float(await self._named(name).calculate_reward(instance_id))

    async def release_tool_instance(self, name: str, instance_id: str) -> None:
        self._instances.pop(instance_id, None)
        await self._named(name).release_instance(instance_id)

    async def release_all_instances(self) -> None:
        for made, name in list(self._instances.items()):
            await self.release_tool_instance(name, made)

    def _named(self, name: str) -> Any:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are: {', '.join(self._tools) or 'none'}")
        return self._tools[name]


def create_openai_tool_schema(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
    """A function's schema in OpenAI's form."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def create_tool(name: str, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A tool by its name here, or by the library's (`Calculator`, `BashExecutor`, `FileEditor`, `Search`, `Finish`)."""
    own = FORMER_NAMES.get(name.lower(), name.lower())
    given = {key: value for key, value in {**(config or {}), **options}.items() if key not in WITHOUT_EFFECT}
    made = get_global_tool_registry().make(own, given)
    if not isinstance(made, Tool):  # several at once: the tools of a server
        return made
    return OurTool(made, SCHEMA_NAMES.get(name.lower(), made.name))


class _CoreTool(OurTool):
    """One of the library's own tools, by its class."""

    kind: ClassVar[str]

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        made = create_tool(self.kind, config, **options)
        super().__init__(made._tool, made.name)


class CalculatorTool(_CoreTool):
    kind = "Calculator"


class BashExecutorTool(_CoreTool):
    kind = "BashExecutor"


class FileEditorTool(_CoreTool):
    kind = "FileEditor"


class SearchTool(_CoreTool):
    kind = "Search"


class FinishTool(_CoreTool):
    kind = "Finish"


def register_tool(tool: Any, config: Mapping[str, Any] | None = None, name: str | None = None) -> Any:
    """Register a tool, or a class of tools, which is made with `config`. A tool that is there anyway, under the same
    name and without settings, needs no registration."""
    given = {key: value for key, value in (config or {}).items() if key not in WITHOUT_EFFECT}
    made = tool(config or {}) if isinstance(tool, type) else tool
    there = isinstance(made, _CoreTool) and not given and made.name in get_global_tool_registry()
    if not there or name not in (None, made.name):
        get_global_tool_registry().register(made, name)
    return tool


def create_tools(configs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Tools by the names that the model sees. A tool that can't be created raises instead of being left out."""
    return {SCHEMA_NAMES.get(name.lower(), name.lower()): create_tool(name, config) for name, config in configs.items()}


def as_tool(tool: Any, name: str) -> Any:
    """A tool of ours, one of the library's kind (`execute_tool` or `execute`), or a function."""
    if isinstance(tool, OurTool):
        return tool if tool.name == name else tool.named(name)
    if isinstance(tool, Tool | ToolSource) and not isinstance(tool, SimpleAgenticTool):
        return tool
    if inspect.isroutine(tool):
        return FunctionTool(tool, name=name)
    return _FormerTool(tool, name)


class _FormerTool:
    """An object with `get_openai_tool_schema` and `execute_tool`, or only with `execute`. Each run has its own
    instance, if the object creates instances."""

    def __init__(self, tool: Any, name: str) -> None:
        function = _function(tool.get_openai_tool_schema()) if hasattr(tool, "get_openai_tool_schema") else {}
        parameters = function.get("parameters") or {}
        self.name = name
        self.description = function.get("description") or inspect.getdoc(type(tool)) or name
        schema = create_openai_tool_schema(
            name, self.description, parameters.get("properties") or {}, parameters.get("required") or ()
        )
        self.parameters: dict[str, Any] = schema["function"]["parameters"]
        self._tool = tool

    async def open(self, context: ToolContext) -> OpenTool:
        made = await _called(getattr(self._tool, "create_instance", None))
        return _OpenFormer(self._tool, str(made or uuid.uuid4().hex))


class _OpenFormer:
    def __init__(self, tool: Any, instance_id: str) -> None:
        self._tool, self._id = tool, instance_id

    async def call(self, arguments: dict[str, Any]) -> _OurResult:
        if hasattr(self._tool, "execute_tool"):
            value = await _called(self._tool.execute_tool, self._id, arguments)
        else:
            value = await _called(self._tool.execute, **arguments)
        return _ours(value)

    async def close(self) -> None:
        await _called(getattr(self._tool, "release_instance", None), self._id)


async def _called(function: Any, *given: Any, **named: Any) -> Any:
    """Call a function, blocking or not, if there is one."""
    value = None if function is None else function(*given, **named)
    return await value if inspect.isawaitable(value) else value


def _function(schema: Any) -> dict[str, Any]:
    """The function of a schema, which verl has as a model."""
    plain = schema if isinstance(schema, Mapping) else schema.model_dump()
    return dict(plain.get("function", plain))


def _ours(value: Any) -> _OurResult:
    """Convert any answer to our result."""
    if isinstance(value, _OurResult):
        return value
    if hasattr(value, "success"):
        said = value.result if value.success else getattr(value, "error", None) or value.result
        reward = getattr(value, "reward_score", None) or None
        return _OurResult(text_of(said), bool(value.success), value.result, reward)
    return _OurResult(text_of(value), data=value)


def _former(value: Any) -> ToolResult:
    """Convert any answer to the library's result."""
    if isinstance(value, _OurResult):
        error = None if value.success else value.output
        result = value.data if value.data is not None or not value.success else value.output
        return ToolResult(value.success, result, error, dict(value.metrics), value.reward or 0.0)
    return value if hasattr(value, "success") else ToolResult(True, value)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
