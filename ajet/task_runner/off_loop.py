"""`call_off_loop(function)`: call blocking user code from a coroutine, in its own thread, while no event loop is
running there. So code that starts a loop itself works: `asyncio.run`, `Runner.run_sync`, `agent.run_sync`.

The coroutine must be run by `run_with_pauses`: its loop stands still during the call. The code finds a loop of its own
as the thread's current one, as a program does at its start.

Clients that nobody closed are collected some time later, try to close their connections on whichever loop is running
then, and fail: `Task exception was never retrieved … Event loop is closed`. So connections are closed while their loop
is there. Loops that user code closes itself can't be had in time; of what their clients say later, that one complaint
is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

CLOSED = "Event loop is closed"


async def close_connections() -> None:
    """Close what is still connected on the running loop."""
    loop = asyncio.get_running_loop()
    transports = list(getattr(loop, "_transports", {}).values())  # asyncio's own list; other loops have none
    for transport in transports:
        transport.abort()
    if transports:
        await asyncio.sleep(0)  # their protocols hear of it in the loop's next round


class _Complaints(logging.Filter):
    """Drops what a client says about the loop that its connections belonged to."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not (
            isinstance(error, RuntimeError)
            and str(error) == CLOSED
            and record.getMessage().startswith("Task exception was never retrieved")
            and "aclose" in record.getMessage()
        )


def drop_complaints() -> None:
    """Drop the complaints of clients whose loop is closed, in this process."""
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


def _call(pause: _Pause, loop: asyncio.AbstractEventLoop, passes: tuple[type[BaseException], ...]) -> None:
    own = asyncio.new_event_loop()
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
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
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
    for task in asyncio.all_tasks(loop):
        task.cancel()
