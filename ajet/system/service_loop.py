"""`ServiceLoop`: the event loop, in its own thread, on which gateway, sessions, trackers and pool live."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_WAKE_S = 0.2


def wait_for(running: Future[T]) -> T:
    """Wait for a result in short sleeps: CPython misses a signal that arrives just as it goes to sleep, so one long
    sleep could delay Ctrl-C to its end."""
    while not wait([running], timeout=_WAKE_S).done:
        pass
    return running.result()


class ServiceLoop:
    """An event loop in a thread. All methods are called from other threads."""

    def __init__(self) -> None:
        self.asyncio_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ajet-service", daemon=True)

    @property
    def running(self) -> bool:
        return self.asyncio_loop.is_running()

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.asyncio_loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. Ctrl-C interrupts the wait and cancels the work."""
        running = self.submit(work)
        try:
            return wait_for(running)
        except BaseException:
            running.cancel()
            raise

    def stop(self, patience_s: float) -> None:
        """Cancel all tasks, end the loop and wait for its thread."""
        self.asyncio_loop.call_soon_threadsafe(self.asyncio_loop.stop)
        self._thread.join(patience_s)

    def _run(self) -> None:
        loop = self.asyncio_loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
