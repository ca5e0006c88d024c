"""`@tool`: a typed function with a docstring becomes a tool.

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
import contextlib
import contextvars
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any, overload

from pydantic import ValidationError

from ajet.tools.signature import arguments_of, parse_docstring, schema_of, values_of
from ajet.tools.text import as_text, plain
from ajet.tools.tool import Arguments, StatelessTool, ToolContext, ToolResult, ToolSetupError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_THREADS = 256
"""A thread that never returns can't be ended: with this many calls of one function at a time, more are refused."""


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
        self._timeout = timeout
        self._running = 0
        self._lock = threading.Lock()

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
        value = await run_in_thread(lambda: self._blocking(values))
        return await value if inspect.isawaitable(value) else value

    def _blocking(self, values: dict[str, Any]) -> Any:
        with self._lock:
            if self._running >= MOST_THREADS:
                raise RuntimeError(f"{self._running} earlier calls have not returned yet")
            self._running += 1
        try:
            return self.function(**values)
        finally:
            with self._lock:
                self._running -= 1


def check_name(name: str) -> str:
    """`name`, if every protocol accepts it as a tool's name."""
    if not NAME.fullmatch(name):
        raise ToolSetupError(f"{name!r} can't name a tool: up to 64 letters, digits, `_` and `-` can")
    return name


async def run_in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a daemon thread: if it never returns, it keeps neither the event loop nor the program."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def main() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = context.run(work)
        except SystemExit as error:
            failure = RuntimeError(f"the function called sys.exit({error.code!r})")
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which a future refuses
                failure = error
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    context = contextvars.copy_context()
    threading.Thread(target=main, name="ajet-tool", daemon=True).start()
    return await answer


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
