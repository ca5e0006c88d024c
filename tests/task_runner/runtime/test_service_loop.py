"""An event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ajet.task_runner import runtime
from ajet.task_runner.runtime import ServiceLoop


def test_work_runs_in_the_loops_thread_and_ends_with_it() -> None:
    service = ServiceLoop()
    service.start()

    async def where() -> str:
        return threading.current_thread().name

    assert service.run(where()) == "ajet-service"
    endless = service.submit(asyncio.sleep(60))
    service.stop(5)
    assert endless.cancelled() and not service.running


def test_an_interrupted_wait_cancels_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cancelled = threading.Event(), threading.Event()

    def interrupted(_running: Any) -> Any:
        assert started.wait(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "wait_for", interrupted)
    service = ServiceLoop()
    service.start()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        service.run(work())
    service.stop(5)
    assert cancelled.wait(5)
