"""Threads that user code starts belong to the episode that started them.

Python's own threads don't inherit context variables (before 3.14), and a pool's threads serve whoever comes. So, once a
process records spans, each new thread remembers the place in which it was made, and functions given to a
`ThreadPoolExecutor` run in the place of whoever gave them. Nothing else about threads changes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet.observe.tracing.recording import Place

_ATTRIBUTE = "_ajet_span_place"
_lock = threading.Lock()
_marked = False


def inherited() -> Place | None:
    """The place in which the running thread was made."""
    place: Place | None = getattr(threading.current_thread(), _ATTRIBUTE, None)
    return place


def mark_threads(current_place: Callable[[], Place | None]) -> None:
    """From now on, threads know where they were made. Called again, it does nothing."""
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
        if isinstance(self, threading._DummyThread):  # it stands for the running thread, and nobody made it
            return
        if (place := current_place()) is not None:
            setattr(self, _ATTRIBUTE, place)

    @functools.wraps(submitted)
    def submit(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        from ajet.observe.tracing.recording import at_place

        place = current_place()

        def there(*args: Any, **kwargs: Any) -> Any:
            with at_place(place):
                return function(*args, **kwargs)

        started: Future[Any] = submitted(self, there, *args, **kwargs)
        return started

    threading.Thread.__init__ = make  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]
