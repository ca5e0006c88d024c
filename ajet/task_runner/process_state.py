"""`ProcessState`: what all threads of a process share and a workflow may change: noticed at the end of each episode,
put back, and named in the log. Workers of `multi-processing` have a process of their own and can't harm others so.

`raise_in` raises an exception in another thread, the next time it executes Python code. Nothing is raised where that
could harm other threads, so a caller that needs the thread to end asks again. Python 3.11 has a defect: while such an
exception is waiting for its thread, every thread that a debugger or a coverage tool traces stops at its next function
call. A thread that waits for a socket may leave it waiting for ever. Under a tracer the exception is therefore taken
back if its thread hasn't met it after a moment.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

ISOLATION = "ajet.task_runner.wrapper_type: multi-processing gives each workflow a process of its own"


class ProcessState:
    """A process's state at the time this object was created."""

    def __init__(self) -> None:
        self._folder = _working_folder()
        self._timeout = socket.getdefaulttimeout()
        self._recursion = sys.getrecursionlimit()
        self._disabled = logging.root.manager.disable

    def restore(self, name: str) -> list[str]:
        """Put back what has changed. `name`: of the thread whose episode has just ended. Returns what it was."""
        changed = []
        if (folder := _working_folder()) != self._folder and self._folder is not None:
            os.chdir(self._folder)
            changed.append(f"the working directory (to {folder or 'one that is gone'})")
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            if getattr(getattr(sys, stream), "closed", False):
                setattr(sys, stream, open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
                changed.append(f"sys.{stream} (closed)")
        if (timeout := socket.getdefaulttimeout()) != self._timeout:
            socket.setdefaulttimeout(self._timeout)
            changed.append(f"the sockets' default timeout (to {timeout})")
        if (limit := sys.getrecursionlimit()) < self._recursion:
            sys.setrecursionlimit(self._recursion)
            changed.append(f"the recursion limit (to {limit})")
        if (level := logging.root.manager.disable) > self._disabled:
            logging.disable(self._disabled)
            changed.append(f"logging (disabled up to level {level})")
        if changed:
            log.warning(
                "a workflow changed what all episodes of this process share: %s. It is put back. It was %s, or one "
                "beside it; %s",
                ", ".join(changed),
                name,
                ISOLATION,
            )
        return changed


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


_MOMENT_S = 0.05

ROUND_S = 0.5
"""How long all other threads together may compute until the interrupting one has its turn again."""

_SHORT_TURN_S = 1e-4

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def raise_in(
    thread: threading.Thread,
    exception: type[BaseException],
    unless: Callable[[], bool],
    wake: Callable[[], None],
    round_s: float = ROUND_S,
) -> None:
    """Raise `exception` in the thread, but not if it has ended, nor if `unless` or its place in the code forbids it.

    `wake` has the thread leave a wait, such as a loop's for events. If all threads compute, this takes two rounds.
    """
    traced = sys.version_info < (3, 12) and _traced()
    with _no_other_thread(
        round_s
    ):  # between the checks and the exception, it can't advance nor another take its identifier
        wake()
        ident = thread.ident
        if ident is None or not thread.is_alive() or unless() or _is_delicate(sys._current_frames().get(ident)):
            return
        if traced:
            _raise_for_a_moment(ident, exception)
        else:
            _set_exception(ctypes.c_ulong(ident), ctypes.py_object(exception))


@contextmanager
def _no_other_thread(round_s: float) -> Iterator[None]:
    """Keep the interpreter lock, also on a machine so busy that this thread doesn't run for a while."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(round_s / threading.active_count())
    try:
        time.sleep(0.001)  # who waits for the lock since before has had it, and now waits by the new interval
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads that compute slow the others down less: of 16, each has the interpreter for 5 ms in turn, so that
    every step of another one waits 80 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SHORT_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class _TakenBackError(BaseException):
    """Raised in the interrupting thread itself: Python looks for waiting exceptions until one has been raised."""


def _raise_for_a_moment(thread: int, exception: type[BaseException]) -> None:
    """No Python function may be called between the first line and the last: it would not return (see above)."""
    sleep, moment, nothing, own = time.sleep, _MOMENT_S, ctypes.py_object(), threading.get_ident()
    try:
        _set_exception(ctypes.c_ulong(thread), ctypes.py_object(exception))
        sleep(moment)
        _set_exception(ctypes.c_ulong(thread), nothing)
        _set_exception(ctypes.c_ulong(own), ctypes.py_object(_TakenBackError))
        sleep(moment)
    except _TakenBackError:
        return


def _traced() -> bool:
    """Whether a debugger, profiler or coverage tool follows this process's threads."""
    if sys.gettrace() or sys.getprofile() or threading.gettrace() or threading.getprofile():
        return True
    return any(frame.f_trace is not None for frame in sys._current_frames().values())


_LOCKING = {function.__code__ for function in (threading.Condition.__enter__, threading.Condition.__exit__)}
_LOGGING = logging.Handler.handle.__code__.co_filename


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether raising an exception in a thread at this frame could harm other threads.

    While a thread is starting another one, CPython identifies both by the same number: the exception could hit the
    wrong one, which would then never report that it has started. A thread that is about to release a lock shared by all
    threads (of logging, an import or a future) would never release it, and the whole process would wait.
    """
    if frame is not None and (frame.f_code in _LOCKING or "importlib" in frame.f_code.co_filename):
        return True
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__ or frame.f_code.co_filename == _LOGGING:
            return True
        frame = frame.f_back
    return False
