"""Threads that run user code: called without a loop (`call_off_loop`), ended cleanly, and interrupted (`raise_in`).
`ProcessState` puts back what all threads of a process share and a workflow changed.

`call_off_loop(function)` calls blocking user code from a coroutine, in its own thread, while no event loop is running
there. So code that starts a loop itself works: `asyncio.run`, `Runner.run_sync`, `agent.run_sync`. The coroutine must
be run by `run_with_pauses`: its loop stands still during the call. The code finds a loop of its own as the thread's
current one, as a program does at its start.

Clients that nobody closed are collected some time later, try to close their connections on whichever loop is running
then, and fail: `Task exception was never retrieved … Event loop is closed`. So connections are closed while their loop
is there. Loops that user code closes itself can't be had in time; of what their clients say later, that one complaint
is dropped.

`raise_in` raises an exception in another thread, the next time it executes Python code. Nothing is raised where that
could harm other threads, so a caller that needs the thread to end asks again. Python 3.11 has a defect: while such an
exception is waiting for its thread, every thread that a debugger or a coverage tool traces stops at its next function
call. A thread that waits for a socket may leave it waiting for ever. Under a tracer the exception is therefore taken
back if its thread hasn't met it after a moment.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

CLOSED = "Event loop is closed"


class WorkflowInterrupted(BaseException):
    """Raised inside user code that is still running after its episode ended. Not an `Exception`, so that user code
    doesn't handle it."""


async def close_connections() -> None:
    """Close what is still connected on the running loop."""
    loop = asyncio.get_running_loop()
    transports = list(getattr(loop, "_transports", {}).values())  # asyncio's own list; other loops have none
    for transport in transports:
        transport.abort()
    if transports:
        await asyncio.sleep(0)  # their protocols hear of it in the loop's next round


class _Complaints(logging.Filter):
    """Drops what a client says about the loop that its connections belonged to, and what a loop says of an interruption
    that met one of its callbacks: whoever interrupts a thread does it again."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, WorkflowInterrupted) and not (
            isinstance(error, RuntimeError)
            and str(error) == CLOSED
            and record.getMessage().startswith("Task exception was never retrieved")
            and "aclose" in record.getMessage()
        )


def drop_complaints() -> None:
    """Drop the complaints of clients whose loop is closed, and of loops that were interrupted, in this process."""
    log = logging.getLogger("asyncio")
    if not any(isinstance(one, _Complaints) for one in log.filters):
        log.addFilter(_Complaints())


T = TypeVar("T")


class _Pause:
    """A function to call while the loop stands still."""

    def __init__(self, function: Callable[[], Any], called: asyncio.Future[None]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.called = called
        self.value: Any = None
        self.error: BaseException | None = None


class _Thread(threading.local):
    wanted: _Pause | None = None
    pausing: asyncio.AbstractEventLoop | None = None
    """The loop that `run_with_pauses` is running."""


_thread = _Thread()


async def call_off_loop(function: Callable[[], T]) -> T:
    """Call `function` with no event loop running. If this is cancelled, the function has returned all the same."""
    loop = asyncio.get_running_loop()
    if loop is not _thread.pausing:
        raise asyncio.CancelledError("what would call this has ended")
    pause = _thread.wanted = _Pause(function, loop.create_future())
    loop.stop()
    await pause.called
    if pause.error is not None:
        raise pause.error
    value: T = pause.value
    return value


class _OwnTasks:
    """Makes the tasks of one loop and remembers them. asyncio looks for a loop's tasks among those of all loops, which
    takes longer at the end of an episode than its own code."""

    def __init__(self) -> None:
        self._made: WeakSet[asyncio.Task[Any]] = WeakSet()

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self._made.add(task)
        return task

    def pending(self) -> set[asyncio.Task[Any]]:
        return {task for task in self._made if not task.done()}


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop for one episode's code, whose tasks `end_loop` finds at once."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(_OwnTasks())
    return loop


def _tasks_of(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """What a loop has still to do; user code may have set a factory of its own."""
    factory: object = loop.get_task_factory()
    return factory.pending() if isinstance(factory, _OwnTasks) else asyncio.all_tasks(loop)


def run_with_pauses(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], passes: tuple[type[BaseException], ...] = ()
) -> T:
    """Run a coroutine that may call `call_off_loop`. `passes`: what such a call raises that ends everything at once."""
    task = loop.create_task(work)
    ended = False
    before, _thread.pausing = _thread.pausing, loop

    def stop(_: asyncio.Task[T]) -> None:
        if not ended:  # an interrupt may come between the task's end and this call
            loop.stop()

    task.add_done_callback(stop)
    try:
        while not task.done():
            loop.run_forever()
            pause, _thread.wanted = _thread.wanted, None
            if pause is not None and not pause.called.done():
                _call(pause, loop, passes)
    finally:
        ended = True
        _thread.pausing = before
        if task.done() and not task.cancelled():
            task.exception()  # raised below, or replaced by what is being raised: not to be logged
    return task.result()


def awaited_stack(coroutine: Any) -> str:
    """The stack of a coroutine that waits. That of its thread ends in the event loop and doesn't show it."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None and not coroutine.cr_running:
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return "".join(traceback.StackSummary.extract(frames).format())


def show_awaited(coroutines: Iterable[Any]) -> None:
    """Write to standard error what they await. For a handler of signals: user code may have closed the descriptor."""
    with suppress(OSError):
        os.write(2, "".join(map(awaited_stack, coroutines)).encode())


def _call(pause: _Pause, loop: asyncio.AbstractEventLoop, passes: tuple[type[BaseException], ...]) -> None:
    own = new_loop()
    asyncio.set_event_loop(own)
    try:
        pause.value = pause.context.run(pause.function)
    except passes:
        raise
    except BaseException as error:  # noqa: BLE001 - raised where the coroutine waits for it
        pause.error = error
    finally:
        asyncio.set_event_loop(loop)
        end_loop(own)
    if not pause.called.done():
        pause.called.set_result(None)


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that isn't running as `asyncio.run` would, and its connections before: in one go, since each start
    of a loop costs as much as a short episode's own code."""
    if loop.is_closed():
        return
    try:
        loop.run_until_complete(_ended())
    finally:
        loop.close()


async def _ended() -> None:
    """Cancel what the running loop still has to do, and shut down what belongs to it."""
    loop = asyncio.get_running_loop()
    for _ in range(2):  # what is cancelled may begin something
        left = _tasks_of(loop) - {asyncio.current_task()}
        if not left:
            break
        for task in left:
            task.cancel()
        await asyncio.wait(left)
    await close_connections()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def cancel_loops(thread: int | None, besides: asyncio.AbstractEventLoop | None) -> None:
    """Cancel all tasks of the loops that are running in a thread, other than `besides`."""
    frame = sys._current_frames().get(thread or -1)
    while frame is not None:
        if frame.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            loop = frame.f_locals["self"]
            if loop is not besides:
                with suppress(RuntimeError):  # closed meanwhile
                    loop.call_soon_threadsafe(_cancel_all, loop)
        frame = frame.f_back


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in _tasks_of(loop):
        task.cancel()


log = logging.getLogger(__name__)

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
_IMPORTING = "<frozen importlib."


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether raising an exception in a thread at this frame could harm other threads.

    While a thread is starting another one, CPython identifies both by the same number: the exception could hit the
    wrong one, which would then never report that it has started. A thread that is about to release a lock shared by all
    threads (of logging, an import or a future) would never release it, and the whole process would wait. A library that
    is imported in part fails all later episodes.
    """
    if frame is not None and frame.f_code in _LOCKING:
        return True
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is threading.Thread.start.__code__ or file == _LOGGING or file.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


ISOLATION = "ajet.task_runner.wrapper_type: multi-processing gives each workflow a process of its own"


class ProcessState:
    """A process's state at the time this object was created."""

    def __init__(self) -> None:
        self._folder = _working_folder()
        self._timeout = socket.getdefaulttimeout()
        self._recursion = sys.getrecursionlimit()
        self._disabled = logging.root.manager.disable
        self._streams: dict[str, Any] = {}
        self._warned = False

    def note_streams(self) -> None:
        """Called when episodes begin and none was running: whatever the streams are then is no workflow's."""
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def restore_streams(self) -> None:
        """Put back the streams that a workflow replaced: no other captures any more what its own code prints."""
        self._warn_of_streams()
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        self._streams = {}

    def restore(self, name: str) -> list[str]:
        """Put back what has changed. `name`: of the thread whose episode has just ended. Returns what it was."""
        changed = []
        if (folder := _working_folder()) != self._folder and self._folder is not None:
            os.chdir(self._folder)
            changed.append(f"the working directory (to {folder or 'one that is gone'})")
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            if getattr(getattr(sys, stream), "closed", False):
                ours = self._streams.get(stream)
                if ours is None or ours.closed:
                    ours = open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
                setattr(sys, stream, ours)
                self._streams[stream] = ours
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
        self._warn_of_streams()
        return changed

    def _warn_of_streams(self) -> None:
        replaced = [f"sys.{name}" for name, stream in self._streams.items() if getattr(sys, name) is not stream]
        if replaced and not self._warned:
            self._warned = True
            log.warning(
                "user code has replaced %s, as `redirect_stdout` does. All episodes of this process share it, so one "
                "may read what another printed; %s",
                *(" and ".join(replaced), ISOLATION),
            )


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None
