"""`Recording`: takes the spans that user code emits anywhere in its process, and gives them to a sink.

It is found through a context variable: so tasks and coroutines of several episodes in one thread keep theirs apart.
Python's own threads don't inherit context variables (before 3.14), and a pool's threads work for many callers. So, once
a process records spans, each new thread remembers the place in which it was made, and functions submitted to a
`ThreadPoolExecutor` run in the place of their caller. Nothing else about threads changes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ajet.observe.tracing import attributes as names
from ajet.observe.tracing.attributes import EmittedReward, bounded, call_of, plain, reward_of
from ajet.schema.span import Span, SpanStatus

OUTSIDE = "local"
"""The attempt of spans that belong to no episode."""
_ATTRIBUTE = "_ajet_span_place"
_lock = threading.Lock()
_marked = False


def inherited() -> SpanPlace | None:
    """The place in which the running thread was made."""
    place: SpanPlace | None = getattr(threading.current_thread(), _ATTRIBUTE, None)
    return place


def mark_threads() -> None:
    """From now on, let each thread remember the place in which it was made. Called again, it does nothing."""
    global _marked
    with _lock:
        if _marked:
            return
        _marked = True
    made: Any = threading.Thread.__init__
    submitted: Any = ThreadPoolExecutor.submit

    @functools.wraps(made)
    def make(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if isinstance(self, threading._DummyThread):  # it stands for the running thread, and has no maker
            return
        if (place := current_place()) is not None:
            setattr(self, _ATTRIBUTE, place)

    @functools.wraps(submitted)
    def submit(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        place = current_place()

        def there(*args: Any, **kwargs: Any) -> Any:
            with at_place(place):
                return function(*args, **kwargs)

        started: Future[Any] = submitted(self, there, *args, **kwargs)
        return started

    threading.Thread.__init__ = make  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]


Sink = Callable[[Span], None]
"""Takes a finished span. Called from any thread; must not block and must not raise."""


class NoRecordingError(RuntimeError):
    """A span was emitted where no episode is recorded."""


def trace_id_of(attempt_id: str) -> str:
    """The trace of an episode: 32 hexadecimal digits."""
    return hashlib.sha256(attempt_id.encode()).hexdigest()[:32]


def root_span_id_of(attempt_id: str) -> str:
    """The span that stands for the whole episode."""
    return hashlib.sha256(attempt_id.encode()).hexdigest()[32:48]


class Recording:
    """The spans of one attempt, on their way to a sink."""

    def __init__(self, sink: Sink, attempt_id: str, rollout_id: str = "") -> None:
        self._sink = sink
        self.attempt_id = attempt_id
        self.rollout_id = rollout_id or attempt_id
        self.trace_id = trace_id_of(attempt_id)
        self.process = os.getpid()
        """A forked process inherits the recording, but what it adds there is lost."""
        self.reward: EmittedReward | None = None
        """The latest that was emitted for the episode."""

    def add(self, span: Span) -> None:
        """Take a span that is finished."""
        if (reward := reward_of(span)) is not None and call_of(span) is None:
            self.reward = reward
        self._sink(span)

    def close(self) -> None:
        """Drop what comes later, from threads that outlive their episode."""
        self._sink = lambda _: None

    @contextmanager
    def active(self) -> Iterator[Recording]:
        """Within this context, what is emitted goes to this recording."""
        mark_threads()
        token = _place.set(SpanPlace(self, root_span_id_of(self.attempt_id)))
        try:
            yield self
        finally:
            with suppress(ValueError):  # a coroutine that is thrown away is closed in another context
                _place.reset(token)


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """The recording and the parent span in which code runs."""

    recording: Recording | None
    """None: nowhere, explicitly."""
    parent_id: str | None = None


_place: ContextVar[SpanPlace | None] = ContextVar("ajet_span_place", default=None)


def current_place() -> SpanPlace | None:
    """Return the place of the running code: by its context, else by the thread that started its thread."""
    place = _place.get() or inherited()
    here = place is not None and place.recording is not None and place.recording.process == os.getpid()
    return place if here else None


@contextmanager
def at_place(place: SpanPlace | None) -> Iterator[None]:
    """Run code as if it were at this place."""
    token = _place.set(place or SpanPlace(None))
    try:
        yield
    finally:
        _place.reset(token)


@contextmanager
def record_spans(sink: Sink | None = None, *, attempt_id: str = OUTSIDE, rollout_id: str = "") -> Iterator[list[Span]]:
    """Record what is emitted within, outside of any episode: for scripts, tests and tools. Yields the spans so far."""
    spans: list[Span] = []

    def keep(span: Span) -> None:
        spans.append(span)
        if sink is not None:
            sink(span)

    with Recording(keep, attempt_id, rollout_id).active():
        yield spans


def new_span_id() -> str:
    """16 random hexadecimal digits."""
    return secrets.token_hex(8)


def _why_not_recorded() -> str:
    place = _place.get() or inherited()
    if place is not None and place.recording is not None:
        return (
            "this is another process than the episode's, so nobody records this span\n"
            "    return the value and emit it in the workflow, or send spans from here (tuner.otlp_environment)"
        )
    return (
        "no episode is running here, so nobody records this span\n"
        "    in a script, use `with ajet.observe.tracing.record_spans() as spans:`"
    )


def emit(
    emitter: str,
    name: str,
    attributes: dict[str, Any],
    *,
    propagate: bool = True,
    status: SpanStatus | None = None,
    start_time: float | None = None,
    span_id: str | None = None,
    gives_reward: bool = False,
) -> Span:
    """Make a span, and add it to the current recording. `propagate=False`: only return it. `emitter`: for
    messages. `gives_reward`: its values are a reward's."""
    place = current_place()
    if place is None and propagate:
        raise NoRecordingError(f"{emitter}: {_why_not_recorded()}; propagate=False only returns the span")
    now = time.time()
    recording = None if place is None else place.recording
    span = Span(
        rollout_id="local" if recording is None else recording.rollout_id,
        attempt_id=OUTSIDE if recording is None else recording.attempt_id,
        trace_id="" if recording is None else recording.trace_id,
        span_id=span_id or new_span_id(),
        parent_id=None if place is None else place.parent_id,
        name=name,
        status=status or SpanStatus(status_code="OK"),
        attributes=plain(attributes),
        start_time=now if start_time is None else start_time,
        end_time=now,
    )
    if not gives_reward and reward_of(span) is not None:  # the keys may be what a model wrote
        span = replace(span, attributes={names.NOT_COUNTED: "only emit_reward gives rewards", **span.attributes})
    span = bounded(span)
    if recording is not None and propagate:
        recording.add(span)
    return span
