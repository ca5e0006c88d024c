"""`operation`: a span over a piece of code, with what went in and what came out. A decorator, or a context manager.

    @operation
    def search(query): ...

    with operation(name="plan", model="small") as plan:
        plan.set_output(...)

Outside of an episode, the code runs as it is, and no span is made.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any

from ajet.observe.tracing import names
from ajet.observe.tracing.attributes import flat
from ajet.observe.tracing.emitters import exception_attributes, failed
from ajet.observe.tracing.recording import Place, _place, current_place, emit, new_span_id
from ajet.schema.span import Span, SpanStatus


class Operation:
    """One execution of an operation, as a context manager. What is emitted within has it as its parent."""

    def __init__(self, name: str, attributes: dict[str, Any], *, propagate: bool = True, encloses: bool = True) -> None:
        """`encloses=False`: what is emitted within doesn't become its child."""
        self._attributes = {**flat(attributes), names.OPERATION_NAME: name}
        self._propagate = propagate
        self._span_id = new_span_id()
        self._encloses = encloses
        self._place: Place | None = None
        self._token: Token[Place | None] | None = None
        self._began = 0.0
        self._span: Span | None = None

    def set_input(self, *values: Any, **named: Any) -> None:
        """What goes in."""
        given = {**{str(index): value for index, value in enumerate(values)}, **named}
        self._attributes |= flat({names.OPERATION_INPUT: given})

    def set_output(self, value: Any) -> None:
        """What comes out."""
        self._attributes |= flat({names.OPERATION_OUTPUT: value})

    def span(self) -> Span | None:
        """The span, once the operation has ended. None if there was no episode."""
        return self._span

    def __enter__(self) -> Operation:
        self._place, self._began = current_place(), time.time()
        if self._place is not None and self._encloses:
            self._token = _place.set(Place(self._place.recording, self._span_id))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is None:
            return
        if self._token is not None:
            _place.reset(self._token)
        status = SpanStatus(status_code="OK")
        if error is not None:
            self._attributes |= exception_attributes(error)
            status = failed(error)
        self._span = emit(
            "operation",
            names.OPERATION,
            self._attributes,
            propagate=self._propagate,
            status=status,
            start_time=self._began,
            span_id=self._span_id,
        )


def operation(
    function: Callable[..., Any] | None = None, *, name: str | None = None, propagate: bool = True, **attributes: Any
) -> Any:
    """Decorate a function (`@operation`, `@operation(name=…)`), or enclose code (`with operation(name=…)`).

    Further keyword arguments become attributes. A decorated function may be plain, a coroutine or a generator of either
    kind."""
    if function is None:
        return _Undecided(name, propagate, attributes)
    if not callable(function):
        raise TypeError(f"@operation takes a function, not {type(function).__name__}")
    return _decorated(function, str(name or getattr(function, "__name__", "operation")), propagate, attributes)


class _Undecided(Operation):
    """`operation(name=…)`: it is entered, or it decorates."""

    def __init__(self, name: str | None, propagate: bool, attributes: dict[str, Any]) -> None:
        super().__init__(name or "operation", attributes, propagate=propagate)
        self._given = (name, attributes)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name, attributes = self._given
        decorated: Callable[..., Any] = operation(function, name=name, propagate=self._propagate, **attributes)
        return decorated


def _decorated(
    function: Callable[..., Any], name: str, propagate: bool, attributes: dict[str, Any]
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def begun(args: tuple[Any, ...], kwargs: dict[str, Any], encloses: bool = True) -> Operation:
        one = Operation(name, attributes, propagate=propagate, encloses=encloses)
        if current_place() is not None:
            try:
                given = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError:  # the call will say so
                given = {}
            given.pop("self", None)
            one.set_input(**given)
        return one

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def call_async_generator(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs, encloses=False):  # between two items, the caller's code runs in the same context
                async for item in function(*args, **kwargs):
                    yield item

        return call_async_generator
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def call_generator(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs, encloses=False):
                yield from function(*args, **kwargs)

        return call_generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs) as one:
                value = await function(*args, **kwargs)
                one.set_output(value)
                return value

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with begun(args, kwargs) as one:
            value = function(*args, **kwargs)
            one.set_output(value)
            return value

    return call
