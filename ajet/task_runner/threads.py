"""A thread and an event loop of its own for each episode's user code.

Blocking code then stops only its own episode. A thread that does not come back can't be killed: it is cancelled, then
interrupted (an exception is raised in it as soon as it executes Python again), then given up as *lost*. So many lost
threads end the run, with a hint at isolated mode.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType
from typing import Any, Generic, TypeVar

from ajet.schema.errors import LostThreadsError

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 2.0
"""How long a thread may go on after its episode before it is interrupted, and again before it counts as lost."""

_AGAIN_S = 0.25

COLLECT_EVERY_S = 10.0
"""`asyncio-with-gc` collects cyclic garbage (agents, their clients and memories) this often, not for every episode: all
threads wait for it."""


class WorkflowInterrupted(BaseException):
    """Raised inside user code that goes on although its episode is over. Not an `Exception`: not to be handled."""


class EpisodeThread(Generic[T]):
    """Runs one coroutine in a fresh daemon thread. `result` is set before the loop's own clean-up."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> None:
        self.result: Future[T] = Future()
        self.released_at: float | None = None
        """When the episode ended, on the monotonic clock; None while it runs."""
        self._work = work
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        self._interrupted = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def name(self) -> str:
        return self._thread.name

    def cancel(self) -> None:
        """Cancel the coroutine at its next `await`."""
        with self._lock:
            self._cancelled = True
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)

    def interrupt(self) -> None:
        """Raise `WorkflowInterrupted` in the thread. Takes effect when it next executes Python code.

        May be without effect (see `_is_delicate`): who means it asks again until the thread is gone.
        """
        ident = self._thread.ident
        time.sleep(0)  # a fresh turn at the interpreter: the thread does not move between the look and the exception
        if (
            self.alive
            and not self._interrupted
            and ident is not None
            and not _is_delicate(sys._current_frames().get(ident))
        ):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(WorkflowInterrupted))

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                try:
                    value = runner.run(self._supervised())
                except WorkflowInterrupted:
                    raise
                except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end its thread unseen
                    self._leave()
                    self.result.set_exception(error)
                else:
                    self._leave()
                    self.result.set_result(value)
        except WorkflowInterrupted:
            self._interrupted = True
            self.result.cancel()  # its episode is over: nobody reads it

    async def _supervised(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), task
            if self._cancelled:
                task.cancel()
        return await self._work()

    def _leave(self) -> None:
        with self._lock:
            self._task = None


_LOCKING = {function.__code__ for function in (threading.Condition.__enter__, threading.Condition.__exit__)}
_LOGGING = logging.Handler.handle.__code__.co_filename


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether an exception raised in a thread that is here could harm others.

    Where it is just starting another thread, CPython knows both by the same number until that one runs: the exception
    could hit the wrong one, which would then never report that it has started. Where it is about to give back a lock of
    all threads (logging's, an import's, a future's), it would keep it, and the whole process would wait for it.
    """
    if frame is not None and (frame.f_code in _LOCKING or "importlib" in frame.f_code.co_filename):
        return True
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__ or frame.f_code.co_filename == _LOGGING:
            return True
        frame = frame.f_back
    return False


class WorkflowThreads:
    """All episode threads of this process. Used on the service loop only."""

    def __init__(self, max_lost: int, *, collect_garbage: bool = False, grace_s: float = GRACE_S) -> None:
        self._max_lost = max_lost
        self._grace_s = grace_s
        self._collect = collect_garbage
        self._collected_at: float | None = None
        self._released: set[EpisodeThread[Any]] = set()
        self._started = 0

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> EpisodeThread[T]:
        """Run `work` in a thread of its own. Raises `LostThreadsError` if too many earlier ones never came back."""
        lost = self.lost
        if len(lost) > self._max_lost:
            raise LostThreadsError(
                f"{len(lost)} workflow threads hang for good (task_runner.max_lost_threads: {self._max_lost}). "
                "Set ajet.task_runner.wrapper_type: multi-processing, which runs each workflow in a process that can "
                f"be killed, or find out why they hang. The last one is here:\n{lost[-1].stack()}"
            )
        self._started += 1
        thread = EpisodeThread(work, f"ajet-episode-{self._started}")
        thread.start()
        return thread

    def release(self, thread: EpisodeThread[Any]) -> None:
        """The episode is over. If its thread is not: cancel it now, interrupt it soon, then count it as lost."""
        thread.released_at = time.monotonic()
        if not thread.result.done():
            thread.cancel()
        self._released = {earlier for earlier in self._released if earlier.alive} | {thread}
        asyncio.get_running_loop().call_later(self._grace_s, self._press, thread)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Once the first episode is over, all libraries are loaded: what lives now need not be searched ever again.

        Without that, every full collection, Python's own ones too, stops all threads for 0.1 s and more.
        """
        first = self._collected_at is None
        if first or (self._collect and time.monotonic() - (self._collected_at or 0.0) > COLLECT_EVERY_S):
            gc.collect()
            self._collected_at = time.monotonic()
        if first and gc.get_freeze_count() == 0:  # once a process: what a later run leaves behind must be found
            gc.freeze()

    async def interrupt_all(self) -> None:
        """There will be no later: interrupt what outlived its episode now, and again for as long as one grace."""
        give_up = time.monotonic() + self._grace_s
        while time.monotonic() < give_up and any(thread.alive for thread in self._released):
            for thread in self._released:
                thread.interrupt()
            await asyncio.sleep(_AGAIN_S)

    @property
    def lost(self) -> list[EpisodeThread[Any]]:
        """Threads that outlived their episode by two graces, latest last."""
        before = time.monotonic() - 2 * self._grace_s
        gone = [thread for thread in self._released if thread.alive and (thread.released_at or before) < before]
        return sorted(gone, key=lambda thread: thread.released_at or before)

    def _press(self, thread: EpisodeThread[Any]) -> None:
        if thread.alive:
            log.warning(
                "%s still runs %.0f s after its episode ended; interrupting it. It is here:\n%s",
                thread.name,
                self._grace_s,
                thread.stack(),
            )
            self._interrupt_again(thread)

    def _interrupt_again(self, thread: EpisodeThread[Any]) -> None:
        """Once may not be enough: Python also swallows what is raised inside a finaliser."""
        if thread.alive:
            thread.interrupt()
            asyncio.get_running_loop().call_later(self._grace_s, self._interrupt_again, thread)
