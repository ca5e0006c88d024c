"""Threads that are interrupted at the worst moment still come to an end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ajet.observe.logs import TRACEBACK
from ajet.schema.errors import UserError
from ajet.schema.user_code import load_symbol
from ajet.task_runner.attempt import WorkflowResult
from ajet.task_runner.thread_control import WorkflowInterrupted, drop_complaints, new_loop
from ajet.task_runner.threads import EpisodeThread, EpisodeThreads, _AttemptInThread


@pytest.mark.slow
def test_an_interrupt_never_hits_a_thread_that_is_being_started() -> None:
    # in a process of its own: loops that are cut off while they close complain when they are collected
    stressed = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, check=False)
    assert stressed.returncode == 0, stressed.stderr[-3000:]


def test_what_lives_after_the_first_episode_is_left_alone_by_later_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(EpisodeThreads, "_frozen", False)

    async def two_runs() -> None:
        for _ in range(2):
            threads = EpisodeThreads(0)
            for _ in range(2):
                thread = threads.start(work)
                assert await asyncio.wrap_future(thread.result) == 1
                threads.release(thread)

    asyncio.run(two_runs())
    assert frozen == [1]


def test_an_episode_that_has_ended_is_freed_without_a_collection() -> None:
    class Kept:
        thread: EpisodeThread[int] | None = None

    kept = Kept()

    async def work_of(kept: Kept) -> int:
        return 1

    thread = EpisodeThread(partial(work_of, kept), "freed")
    kept.thread, freed = thread, weakref.ref(kept)  # as an attempt holds the thread that runs it
    gc.disable()
    try:
        thread.start()
        assert thread.result.result(10) == 1
        thread._thread.join(10)
        del kept
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("own_factory", [False, True], ids=["ours", "the user's"])
def test_an_episode_s_end_cancels_the_tasks_that_it_left(own_factory: bool) -> None:
    ended: list[str] = []

    async def wait_for_ever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def leave_two() -> int:
        kept.append(asyncio.create_task(wait_for_ever("first")))
        if own_factory:
            loop = asyncio.get_running_loop()
            loop.set_task_factory(lambda loop, work, **options: asyncio.Task(work, loop=loop, **options))
        kept.append(asyncio.create_task(wait_for_ever("second")))
        await asyncio.sleep(0)
        return 1

    kept: list[asyncio.Task[None]] = []
    thread = EpisodeThread(leave_two, "an episode")
    thread.start()
    assert thread.result.result(30) == 1
    thread._thread.join(30)
    assert sorted(ended) == ["first", "second"]
    assert all(task.cancelled() for task in kept)


def test_a_thread_that_fails_after_its_episode_was_stopped_is_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    async def stopped() -> None:
        threads = EpisodeThreads(0)
        go_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def fail() -> WorkflowResult:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))
            raise KeyError("late")

        thread = threads.start(fail)
        runner: Any = None  # it is told of the attempt's end alone
        waiting = asyncio.create_task(_AttemptInThread(runner, thread, None, None).result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        ended = asyncio.wrap_future(thread.result)
        go_on.set()
        await asyncio.wait([ended])
        assert isinstance(ended.exception(), KeyError)

    asyncio.run(stopped())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_who_stops_waiting_leaves_the_thread_its_result() -> None:
    """It would end with a traceback on the terminal."""

    async def stop_waiting() -> None:
        threads = EpisodeThreads(0)
        returned = threading.Event()

        async def late() -> int:
            await asyncio.to_thread(returned.wait)
            return 1

        thread = threads.start(late)
        waiting = asyncio.ensure_future(asyncio.wrap_future(thread.result))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        returned.set()
        assert await asyncio.to_thread(thread.result.result, 30) == 1

    asyncio.run(stop_waiting())


def test_a_hanging_thread_is_one_line_on_the_terminal_and_its_stack_is_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    hang = hanging(tmp_path)
    release = threading.Event()

    async def outlive() -> None:
        threads = EpisodeThreads(10, grace_s=0.0)
        thread = threads.start(lambda: hang(release))
        while "in hang" not in thread.stack():
            await asyncio.sleep(0.01)
        threads.release(thread)
        while not caplog.records:
            await asyncio.sleep(0.01)
        await threads.interrupt_all()
        release.set()
        await asyncio.gather(asyncio.wrap_future(thread.result), return_exceptions=True)

    asyncio.run(outlive())
    late, left = caplog.records
    assert late.getMessage().endswith(f"interrupting it, at {tmp_path}/agent.py:2 in hang")
    assert "threading.py" in getattr(late, TRACEBACK)
    assert left.getMessage().endswith(f"are left behind: 1, at {tmp_path}/agent.py:2 in hang")


def hanging(folder: Path) -> Callable[[threading.Event], Coroutine[Any, Any, None]]:
    """A user's function that hangs where nothing interrupts it, until the event is set."""
    file = folder / "agent.py"
    file.write_text("async def hang(release):\n    release.wait()\n", encoding="utf-8")
    function: Callable[[threading.Event], Coroutine[Any, Any, None]] = load_symbol(f"{file}->hang")
    return function


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


def test_an_interruption_that_meets_a_callback_of_the_loop_is_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    drop_complaints()
    loop = new_loop()

    def interrupted() -> None:
        raise WorkflowInterrupted

    loop.call_soon(interrupted)
    loop.run_until_complete(asyncio.sleep(0))
    assert caplog.text == ""
    loop.call_soon(lambda: 1 // 0)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert "ZeroDivisionError" in caplog.text


NO_MORE_FILES = """
import asyncio, resource
from ajet.schema.errors import UserError
from ajet.task_runner.threads import EpisodeThreads

async def start_many():
    threads = EpisodeThreads()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    try:
        return [threads.start(lambda: asyncio.sleep(60)) for _ in range(40)]
    except UserError as error:
        print(error)

asyncio.run(start_many())
"""


def test_where_no_more_files_may_be_opened_an_episode_ends_instead_of_waiting_for_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_MORE_FILES], capture_output=True, text=True, timeout=60)
    assert "Too many open files\n    lower ajet.rollout.max_env_worker" in ended.stdout, ended.stderr


def test_where_no_more_threads_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # what Python says at the system's limit

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UserError, match="lower ajet\\.rollout\\.max_env_worker"):
        EpisodeThreads().start(lambda: asyncio.sleep(0))


if __name__ == "__main__":
    asyncio.run(interrupt_many())
