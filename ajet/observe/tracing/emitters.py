"""What user code calls to record what happens in an episode: rewards, messages, objects, exceptions, anything.

`operation` is a span over a piece of code, with what went in and what came out, as a decorator or a context manager:

    @operation
    def search(query): ...

    with operation(name="plan", model="small") as plan:
        plan.set_output(...)

Outside of an episode, the code runs as it is, and no span is made.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any

from ajet.observe.tracing import attributes as names
from ajet.observe.tracing.attributes import flat, plain
from ajet.observe.tracing.recording import SpanPlace, _place, current_place, emit, new_span_id
from ajet.schema.errors import RewardError
from ajet.schema.span import Span, SpanStatus
from ajet.schema.task import finite_reward

_MOST_STACK = 8_000
"""Characters of a stack trace, its end."""


def emit_reward(
    reward: Any,
    *,
    call: str | None = None,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span:
    """Record a reward: a number, or numbers by name, of which `primary_key` names the one that is trained.

    With `call`, the `id` of a response, it is that model call's, and is added to the outcome. Without, the last one
    emitted is the episode's reward if the workflow returns none. Raises TypeError or ValueError.
    """
    if isinstance(reward, Mapping):
        dimensions = _dimensions(reward, primary_key)
    elif primary_key is not None:
        raise ValueError("emit_reward: primary_key is for rewards by name")
    else:
        dimensions = {names.PRIMARY: _number(reward, "emit_reward")}
    values: dict[str, Any] = {}
    for index, (name, value) in enumerate(dimensions.items()):
        values[names.REWARD_NAME.format(index)] = name
        values[names.REWARD_VALUE.format(index)] = value
    if call is not None:
        if not isinstance(call, str):
            raise TypeError(f"emit_reward: call is the id of a response, not {type(call).__name__}")
        values |= {names.LINK_KEY.format(0): names.RESPONSE_ID, names.LINK_VALUE.format(0): call}
    values = {**flat(attributes or {}), **values}
    return emit("emit_reward", names.ANNOTATION, values, propagate=propagate, gives_reward=True)


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> Span:
    """Record anything worth knowing, as attributes."""
    if not isinstance(annotation, Mapping):
        raise TypeError(f"emit_annotation takes a mapping, not {type(annotation).__name__}")
    return emit("emit_annotation", names.ANNOTATION, flat(annotation), propagate=propagate)


def emit_message(message: str, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Span:
    """Record a text."""
    if not isinstance(message, str):
        raise TypeError(f"emit_message takes a text, not {type(message).__name__}; emit_object takes any object")
    values = {**flat(attributes or {}), names.MESSAGE_BODY: message}
    return emit("emit_message", names.MESSAGE, values, propagate=propagate)


def emit_object(value: Any, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Span:
    """Record an object: its value if it is a text, a number, bytes or JSON, else its `repr`."""
    values: dict[str, Any] = {**flat(attributes or {}), names.OBJECT_TYPE: type(value).__name__}
    if isinstance(value, bytes):
        values[names.OBJECT_LITERAL] = b64encode(value).decode()
    elif value is None or isinstance(value, str | bool | int | float):
        values[names.OBJECT_LITERAL] = str(value)
    elif isinstance(value, dict | list | tuple):
        values[names.OBJECT_JSON] = json.dumps(plain(value), ensure_ascii=False)
    else:
        values[names.OBJECT_LITERAL] = plain(value) if isinstance(plain(value), str) else json.dumps(plain(value))
    return emit("emit_object", names.OBJECT, values, propagate=propagate)


def emit_exception(
    error: BaseException, *, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span:
    """Record an exception that the code has caught."""
    if not isinstance(error, BaseException):
        raise TypeError(f"emit_exception takes an exception, not {type(error).__name__}")
    values = {**flat(attributes or {}), **exception_attributes(error)}
    status = failed(error)
    return emit("emit_exception", names.EXCEPTION, values, propagate=propagate, status=status)


def exception_attributes(error: BaseException) -> dict[str, Any]:
    """OpenTelemetry's attributes of an exception."""
    return {
        "exception.type": type(error).__name__,
        "exception.message": _said(error),
        "exception.stacktrace": "".join(traceback.format_tb(error.__traceback__))[-_MOST_STACK:],
    }


def failed(error: BaseException) -> SpanStatus:
    """The status of what an exception ended."""
    return SpanStatus(status_code="ERROR", description=f"{type(error).__name__}: {_said(error)}"[:1000])


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as wrong:  # noqa: BLE001 - an exception class of the user's whose __str__ raises
        return f"(its __str__ raised {type(wrong).__name__})"


def _dimensions(reward: Mapping[Any, Any], primary: str | None) -> dict[str, float]:
    if primary is None or primary not in reward:
        raise ValueError(f"emit_reward: primary_key must name one of {', '.join(map(repr, reward)) or 'the rewards'}")
    values = {str(name): _number(value, f"emit_reward: {name!r}") for name, value in reward.items()}
    return {primary: values.pop(primary), **values}


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool):
        return float(value)
    try:
        return finite_reward(value, what)
    except RewardError as error:
        is_number = isinstance(value, int | float) or getattr(value, "ndim", None) == 0
        raise (ValueError if is_number else TypeError)(str(error)) from None


class Operation:
    """One execution of an operation, as a context manager. What is emitted within has it as its parent."""

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        propagate: bool = True,
        encloses: bool = True,
        span_name: str = names.OPERATION,
    ) -> None:
        """`encloses=False`: what is emitted within doesn't become its child."""
        self._span_name = span_name
        self._attributes = {**flat(attributes), names.OPERATION_NAME: name}
        self._propagate = propagate
        self._span_id = new_span_id()
        self._encloses = encloses
        self._place: SpanPlace | None = None
        self._token: Token[SpanPlace | None] | None = None
        self._began = 0.0
        self._span: Span | None = None

    def set_input(self, *values: Any, **named: Any) -> None:
        """Record what goes in."""
        given = {**{str(index): value for index, value in enumerate(values)}, **named}
        self._attributes |= flat({names.OPERATION_INPUT: given})

    def set_output(self, value: Any) -> None:
        """Record what comes out."""
        self._attributes |= flat({names.OPERATION_OUTPUT: value})

    def set_attribute(self, name: str, value: Any) -> None:
        """Record anything else."""
        self._attributes |= flat({name: value})

    def span(self) -> Span | None:
        """The span, once the operation has ended. None if there was no episode."""
        return self._span

    def __enter__(self) -> Operation:
        self._place, self._began = current_place(), time.time()
        if self._place is not None and self._encloses:
            self._token = _place.set(SpanPlace(self._place.recording, self._span_id))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is None:
            return
        if self._token is not None:
            _place.reset(self._token)
        status = SpanStatus(status_code="OK")
        if error is not None and not isinstance(error, GeneratorExit):  # a caller that reads no further is no fault
            self._attributes |= exception_attributes(error)
            status = failed(error)
        self._span = emit(
            "operation",
            self._span_name,
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
