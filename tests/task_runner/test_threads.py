"""Threads that are interrupted at the worst moment still come to an end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

import pytest

from ajet.task_runner.threads import EpisodeThreads


@pytest.mark.slow
def test_an_interrupt_never_hits_a_thread_that_is_being_started() -> None:
    # in a process of its own: loops that are cut off while they close complain when they are collected
    stressed = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False)
    assert stressed.returncode == 0, stressed.stderr[-3000:]


def test_what_lives_after_the_first_episode_is_left_alone_by_later_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))

    async def two_runs() -> None:
        for _ in range(2):
            threads = EpisodeThreads(0)
            for _ in range(2):
                thread = threads.start(work)
                assert await asyncio.wrap_future(thread.result) == 1
                threads.release(thread)

    asyncio.run(two_runs())
    assert frozen == [1]


async def work() -> int:
    """Its loop starts a thread while it closes: that of `asyncio.to_thread` is shut down by another."""
    await asyncio.to_thread(time.sleep, 0.001)
    await asyncio.sleep(0.01)
    return 1


async def interrupt_many() -> None:
    for _ in range(25):
        threads = EpisodeThreads(10**6, grace_s=0.0)
        started = [threads.start(work) for _ in range(50)]
        await asyncio.sleep(0.011)
        for thread in started:
            threads.release(thread)
        give_up = time.monotonic() + 30
        while any(thread.alive for thread in started) and time.monotonic() < give_up:
            for thread in started:
                thread.interrupt()
            await asyncio.sleep(0.003)
        stuck = [thread.stack() for thread in started if thread.alive]
        assert not stuck, stuck[0]


if __name__ == "__main__":
    asyncio.run(interrupt_many())
