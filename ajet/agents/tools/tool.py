"""`Tool`: what an agent may call by name, with arguments that a JSON schema describes; `@tool` makes one of a function.

A tool's class holds what all episodes share; what one episode leaves behind (a working directory, an undo list) lives
in the object that `open` returns, which the episode closes. A call never raises for what the model did wrong: it
answers with a `ToolResult` that the model can act on.

    @tool
    def weather(city: str, days: int = 1) -> str:
        '''The weather forecast.

        Args:
            city: Its English name.
            days: How many days ahead.
        '''

The schema comes from the annotations and the docstring. Arguments arrive as the annotated types. A parameter annotated
`ToolContext` is given the episode's. A plain `def` runs in a thread, so that it may block; the result is text, or
anything that JSON can hold, or a `ToolResult`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, get_type_hints, overload, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

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


# ---------------------------------------------------------------- functions as tools

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_UNDERLINED = re.compile(
    r"^(Parameters|Other Parameters|Returns|Yields|Raises|Warns|Notes?|Examples?|See Also|References) *\n-{3,} *$", re.M
)
_ENTRY = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^\s*:param\s+(?:[\w\[\], |]+\s+)?(\w+)\s*:\s*(.*)$")


class Docstring(NamedTuple):
    """A docstring: its text without the sections, and what it says about each parameter."""

    summary: str
    parameters: dict[str, str]


class Signature(NamedTuple):
    """A function's parameters."""

    model: type[BaseModel]
    context_name: str | None
    """The parameter that takes the `ToolContext`, which the model doesn't see."""


def arguments_of(function: Callable[..., Any], name: str) -> Signature:
    """The parameters of `function`. Raises `ToolSetupError` for what no JSON object can fill."""
    target = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        hints = get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ToolSetupError(f"{name}: an annotation can't be resolved: {error}") from None
    described = parse_docstring(inspect.getdoc(function) or "").parameters
    fields: dict[str, Any] = {}
    context_name = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSetupError(
                f"{name}: parameter {parameter} can't be filled from a JSON object: use plain named parameters"
            )
        annotation = hints.get(parameter.name, Any)
        if annotation is ToolContext:
            context_name = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias: a model may not have a field of this name (`schema`, `_x`), but a function may have the parameter.
        fields[f"p_{parameter.name}"] = (
            annotation,
            Field(default, alias=parameter.name, description=described.get(parameter.name)),
        )
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
    except PydanticUserError as error:
        raise ToolSetupError(f"{name}: {error.message.splitlines()[0]}") from None
    return Signature(model, context_name)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the parameters, without what a model has no use for."""
    schema: dict[str, Any] = _without_titles(model.model_json_schema(by_alias=True))
    schema.setdefault("properties", {})
    return schema


def values_of(arguments: BaseModel) -> dict[str, Any]:
    """Checked arguments by the parameters' names, as the objects that the function expects."""
    return {name.removeprefix("p_"): getattr(arguments, name) for name in type(arguments).model_fields}


def parse_docstring(text: str) -> Docstring:
    """Read Google's style (`Args:`), Sphinx's (`:param x:`) and NumPy's (`Parameters`, underlined)."""
    if headings := list(_UNDERLINED.finditer(text)):
        return _numpy_docstring(text, headings)
    summary: list[str] = []
    parameters: dict[str, str] = {}
    section, current = "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, current = heading[1], ""
        elif entry := _FIELD.match(line):
            current, section = entry[1], "Args"
            parameters[current] = entry[2].strip()
        elif section in ("Args", "Arguments", "Parameters") and (entry := _ENTRY.match(line)) and _indent(line) <= 4:
            current = entry[1]
            parameters[current] = entry[2].strip()
        elif section and current and line.strip() and line[0] == " ":
            parameters[current] = f"{parameters[current]} {line.strip()}".strip()
        elif line.strip() and section and line[0] != " " and not line.startswith(":"):
            section, current = "", ""
            summary.append(line)
        elif not section and not line.startswith(":"):
            summary.append(line)
    return Docstring("\n".join(summary).strip(), parameters)


def _numpy_docstring(text: str, headings: list[re.Match[str]]) -> Docstring:
    """`name : type`, with the description indented below."""
    parameters: dict[str, str] = {}
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends, strict=True):
        if heading[1] not in ("Parameters", "Other Parameters"):
            continue
        names: list[str] = []
        for line in text[heading.end() : end].splitlines():
            if line.strip() and line[0] != " ":
                names = [name.strip(" *") for name in line.partition(":")[0].split(",")]
                parameters |= dict.fromkeys(names, "")
            else:
                parameters |= {name: f"{parameters[name]} {line.strip()}".strip() for name in names}
    return Docstring(text[: headings[0].start()].strip(), parameters)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """`names`: the keys are names of properties, among which `title` is as good as any."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value, names=not names and key in ("properties", "$defs"))
            for key, value in schema.items()
            if names or key != "title" or not isinstance(value, str)
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FunctionTool(StatelessTool):
    """A function as a tool. It can still be called like the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        self.function = function
        self.name = check_name(name or str(getattr(function, "__name__", type(function).__name__)))
        self.description = description or parse_docstring(inspect.getdoc(function) or "").summary
        if not self.description:
            raise ToolSetupError(f"tool {self.name!r} needs a docstring: it tells the model what the tool is for")
        self._signature = arguments_of(function, self.name)
        self.parameters = schema_of(self._signature.model)
        self.limits_itself = timeout is not None
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        try:
            values = values_of(self._signature.model.model_validate(arguments))
        except ValidationError as error:
            return ToolResult(f"{self.name} was not called: {_problems(error)}", success=False)
        if self._signature.context_name is not None:
            values[self._signature.context_name] = context
        try:
            async with asyncio.timeout(self._timeout) as limit:
                value = await self._call(values)
        except TimeoutError:
            if not limit.expired():
                raise  # the function's own
            return ToolResult(f"{self.name} did not finish within {self._timeout:g} s.", success=False)
        return value if isinstance(value, ToolResult) else ToolResult(as_text(value), data=plain(value))

    async def _call(self, values: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        value = await run_in_thread(lambda: self.function(**values))
        return await value if inspect.isawaitable(value) else value


def check_name(name: str) -> str:
    """`name`, if every protocol accepts it as a tool's name."""
    if not NAME.fullmatch(name):
        raise ToolSetupError(f"{name!r} can't name a tool: up to 64 letters, digits, `_` and `-` can")
    return name


async def run_in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread: if it never returns, it keeps neither the event loop nor the program."""
    context = contextvars.copy_context()
    answer: Future[Any] = Future()

    def main() -> None:
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            answer.set_result(context.run(work))
        except SystemExit as error:
            answer.set_exception(RuntimeError(f"the function called sys.exit({error.code!r})"))
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # which asyncio refuses
            answer.set_exception(error if plain else RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=main, name="ajet-tool", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _problems(error: ValidationError) -> str:
    lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]]
    return "; ".join(lines)


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout: float | None = 60.0
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = 60.0,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function: `@tool`, or `@tool(name=…, timeout=…)`."""

    def make(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name=name, description=description, timeout=timeout)

    return make if function is None else make(function)
