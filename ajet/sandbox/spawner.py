"""`start`: processes that die with this one.

The kernel ends such a process when the *thread* that started it ends. So one thread of this process, which never ends,
starts them all.
"""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

_Job = tuple[Sequence[str], dict[str, Any], "Future[subprocess.Popen[bytes]]"]


class _Spawner:
    def __init__(self) -> None:
        self.process = os.getpid()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="ajet-sandboxes", daemon=True).start()

    def submit(self, arguments: Sequence[str], options: dict[str, Any]) -> Future[subprocess.Popen[bytes]]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((arguments, options, started))
        return started

    def _main(self) -> None:
        while True:
            arguments, options, started = self._jobs.get()
            try:
                process: Any = subprocess.Popen(arguments, **options)
                started.set_result(process)
            except Exception as error:  # noqa: BLE001 - raised where the start is awaited
                started.set_exception(error)


_lock = threading.Lock()
_spawner: _Spawner | None = None


async def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, on the thread that never ends."""
    global _spawner
    with _lock:
        if _spawner is None or _spawner.process != os.getpid():  # a fork has the object, but not the thread
            _spawner = _Spawner()
        spawner = _spawner
    return await asyncio.wrap_future(spawner.submit(arguments, options))


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
