"""`Toolset`: the tools of one episode, opened together and closed together.

    async with Toolset([Calculator(), Finish()], context) as toolset:
        toolset.schemas()                                          # for the model
        result = await toolset.call("calculator", '{"expression": "6*7"}')

`call` never raises for what a model or a tool does wrong: a name that doesn't exist, arguments that aren't JSON or
don't fit the schema, an exception, a call that never ends, endless output. The result says what was wrong and what to
do. Only a sandbox that itself died (`SandboxError`), an environment or an MCP server (`EnvironmentFault`) is raised: no
message to the model helps there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

from ajet.agents.tools.tool import (
    Arguments,
    OpenTool,
    Tool,
    ToolConnection,
    ToolContext,
    ToolResult,
    ToolSetupError,
    ToolSource,
    as_text,
    describe_error,
    shorten,
)
from ajet.environment.sandboxes import SandboxError
from ajet.schema.errors import EnvironmentFault

log = logging.getLogger(__name__)

PROBLEMS_SHOWN = 5
"""The most problems with one call's arguments that are reported to the model."""

# Patterns are the tool author's, but the text they run on is the model's: one bad pair would freeze the process.
_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": None, "patternProperties": None})
_NO_FETCHING: referencing.Registry[Any] = referencing.Registry()
"""A `$ref` to another host is an error and not a request."""


class Toolset:
    """Opened tools. An async context manager."""

    def __init__(
        self,
        tools: Sequence[Tool | ToolSource],
        context: ToolContext | None = None,
        *,
        call_seconds: float = 300.0,
        output_chars: int = 20_000,
    ) -> None:
        """`call_seconds`: the longest that a call of a tool without a limit of its own may take. `output_chars`: the
        most that the model is shown of a result."""
        self._tools = tools
        self._context = context or ToolContext()
        self._call_seconds = call_seconds
        self._output_chars = output_chars
        self._open: dict[str, _Entry] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Toolset:
        try:
            for tool in self._tools:
                if isinstance(tool, ToolSource):
                    connection = await tool.connect(self._context)
                    self._stack.push_async_callback(_close, type(tool).__name__, connection)
                    for each in connection.tools:
                        await self._add(each)
                elif isinstance(tool, Tool):
                    await self._add(tool)
                else:
                    raise ToolSetupError(
                        f"{tool!r:.100} is not a tool: `make_tools([…])` makes tools of names and of functions"
                    )
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all tools. One that fails to close is logged; the others are closed all the same."""
        self._open = {}
        await self._stack.aclose()

    async def _add(self, tool: Tool) -> None:
        if tool.name in self._open:
            raise ToolSetupError(f"two tools are called {tool.name!r}: give one of them another name")
        validator = _validator(tool)
        opened = await tool.open(self._context)
        self._stack.push_async_callback(_close, tool.name, opened)
        self._open[tool.name] = _Entry(tool, opened, validator)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form."""
        return [tool_schema(entry.tool) for entry in self._open.values()]

    async def call(self, name: str, arguments: str | dict[str, Any]) -> ToolResult:
        """Call a tool with arguments as the model wrote them (JSON text) or already parsed."""
        result = await self._answer(name, arguments)
        return replace(result, output=shorten(result.output, self._output_chars))

    async def _answer(self, name: str, arguments: str | dict[str, Any]) -> ToolResult:
        entry = self._open.get(name)
        if entry is None:
            return _failed(self._unknown(name))
        try:
            parsed = parse_arguments(arguments)
            entry.check(parsed)
            parsed = _in_whole_numbers(parsed, entry.tool.parameters)
        except ValueError as error:
            return _failed(f"{name} was not called: {error}\nExpected: {signature_line(entry.tool)}")
        seconds = None if getattr(entry.tool, "limits_itself", False) else self._call_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                given: Any = await entry.opened.call(parsed)
            result = given if isinstance(given, ToolResult) else ToolResult(given)
            result = replace(result, output=as_text(result.output))
        except (SandboxError, EnvironmentFault):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # what a tool raises is an answer to the model
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # it was not the tool's own
            if isinstance(error, TimeoutError) and limit.expired():
                return _failed(f"{name} did not finish within {seconds:g} s and was stopped. Ask for less work.")
            log.debug("tool %s raised", name, exc_info=True)
            return _failed(f"{name} failed: {describe_error(error)}")
        if result.reward is not None and not math.isfinite(result.reward):
            return _failed(f"{name} failed: its reward is {result.reward}, which is not a finite number")
        return result

    def _unknown(self, name: str) -> str:
        if not self._open:
            return f"There is no tool {name[:100]!r}: this agent has no tools. Answer without one."
        near = get_close_matches(name, self._open, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"There is no tool {name[:100]!r}.{hint} The tools are: {', '.join(self._open)}."


class _Entry:
    """One opened tool."""

    def __init__(self, tool: Tool, opened: OpenTool, validator: Any) -> None:
        self.tool = tool
        self.opened = opened
        self._validator = validator

    def check(self, arguments: Arguments) -> None:
        """Raises ValueError that says what doesn't fit the schema."""
        try:
            errors = list(islice(self._validator.iter_errors(arguments), PROBLEMS_SHOWN))
        except RecursionError:
            raise ValueError("the arguments are nested too deeply") from None
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(f"the tool's own schema refers to something that isn't there: {error.ref}") from None
        if errors:
            raise ValueError("; ".join(_problem(error, self.tool) for error in errors))


async def schemas_of(tools: Sequence[Tool | ToolSource]) -> list[dict[str, Any]]:
    """The tools in OpenAI's form, without an episode. A server is asked for its tools."""
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, ToolSource):
            connection = await tool.connect(ToolContext())
            schemas += map(tool_schema, connection.tools)
            await connection.close()
        else:
            schemas.append(tool_schema(tool))
    return schemas


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def signature_line(tool: Tool) -> str:
    """A tool's arguments on one line: `search(pattern: string, path?: string)`."""
    properties: dict[str, Any] = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", [])
    defined: dict[str, Any] = tool.parameters.get("$defs", {})
    shown = [
        f"{name}{'' if name in required else '?'}: {type_of(schema, defined)}" for name, schema in properties.items()
    ]
    return f"{tool.name}({', '.join(shown)})"


def parse_arguments(arguments: str | dict[str, Any]) -> Arguments:
    """The arguments of a call as a dict. Raises ValueError that a model can act on."""
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise ValueError(f"the arguments must be a JSON object, not {type(arguments).__name__}")
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        near = arguments[max(0, error.pos - 20) : error.pos + 20]
        raise ValueError(
            f"the arguments aren't valid JSON: {error.msg} at character {error.pos}, near {near!r}. "
            "Send one JSON object, with quotes and line breaks inside strings escaped"
        ) from None
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"the arguments must be a JSON object, not {type(parsed).__name__}")
    return parsed


def _in_whole_numbers(value: Any, schema: Any) -> Any:
    """Put an integer where the schema wants one: in JSON, `2.0` is one, too."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, dict):
        known = schema.get("properties") or {}
        return {name: _in_whole_numbers(inner, known.get(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_in_whole_numbers(inner, schema.get("items")) for inner in value]
    return int(value) if isinstance(value, float) and schema.get("type") == "integer" else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON: send a number")


def _validator(tool: Tool) -> Any:
    if tool.parameters.get("type") != "object":
        raise ToolSetupError(f"tool {tool.name!r}: parameters must be a JSON schema with `type: object`")
    try:
        _VALIDATOR.check_schema(tool.parameters)
    except jsonschema.SchemaError as error:
        raise ToolSetupError(f"tool {tool.name!r}: parameters are not a valid JSON schema: {error.message}") from None
    return _VALIDATOR(tool.parameters, registry=_NO_FETCHING)


def _problem(error: Any, tool: Tool) -> str:
    """One violation of the schema, for the model."""
    error = jsonschema.exceptions.best_match([error])  # where one of several schemas must fit, what comes nearest
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    if error.validator == "additionalProperties" and not place:
        known = tool.parameters.get("properties", {})
        extra = [name for name in error.instance if name not in known]
        return f"it has no argument {', '.join(map(repr, extra))}"
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        return f"{place or 'the call'} lacks {', '.join(map(repr, missing))}"
    return f"{place or 'the call'}: {shorten(error.message, 300)}"


def type_of(schema: Any, defined: Mapping[str, Any] | None = None) -> str:
    """The type that a JSON schema asks for, in short. `defined`: what a `$ref` in it may mean."""
    if not isinstance(schema, dict):
        return "any"
    meant = (defined or {}).get(str(schema.get("$ref", "")).removeprefix("#/$defs/"))
    if isinstance(meant, dict) and "$ref" not in meant:
        return type_of(meant)
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "type" in schema:
        kinds = schema["type"]
        return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    choices = schema.get("anyOf") or schema.get("oneOf")
    return " or ".join(type_of(choice, defined) for choice in choices) if choices else "any"


def _failed(message: str) -> ToolResult:
    return ToolResult(message, success=False)


async def _close(name: str, opened: OpenTool | ToolConnection) -> None:
    try:
        await opened.close()
    except Exception:  # the episode's result stands; the other tools must be closed too
        log.warning("tool %s failed to close", name, exc_info=True)
