"""`ThreadRunner`: attempts in this process, each in a thread with its own event loop, so that code that blocks stops
only its own episode.

A thread that doesn't return can't be killed: it is cancelled, then interrupted (an exception is raised in it the next
time it executes Python code), and finally counted as *lost*. Too many lost threads end the run, with a hint at
`wrapper_type: multi-processing`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ajet.environment.environment import EnvironmentSource
from ajet.environment.leased import LeasedEnvironment
from ajet.environment.sandboxes import SandboxSettings
from ajet.observe.logs import TRACEBACK
from ajet.schema.episode import EnvironmentRecord
from ajet.schema.errors import LostThreadsError, UserError, WorkflowFault, at_user_line, condensed
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import AttemptHandle, EarlyEnding, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.environments import EnvironmentEndings, LeasedSandbox
from ajet.task_runner.results import run_workflow
from ajet.task_runner.thread_control import (
    ROUND_S,
    ProcessState,
    WorkflowInterrupted,
    awaited_stack,
    cancel_loops,
    drop_complaints,
    end_loop,
    new_loop,
    raise_in,
    run_with_pauses,
)
from ajet.task_runner.workflow import Workflow

if TYPE_CHECKING:
    from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 2.0
"""How long a thread may continue after its episode before it is interrupted, and again before it counts as lost."""
MAX_LOST = 8
"""Threads that may hang for good before the run ends."""

_AGAIN_S = 0.25
_LAST_ROUND_S = 0.05
"""When everything ends, many threads may have to be interrupted in one grace period."""

COLLECT_EVERY_S = 10.0
"""How often `asyncio-with-gc` collects cyclic garbage (agents, their clients and memories). Not after every episode,
since a collection stops all threads."""


class ThreadRunner:
    """Runs attempts in threads. The workflow may block; it must not crash the interpreter, nor hang too often."""

    def __init__(
        self,
        workflow_class: type[Workflow],
        judge: BaseJudge | None,
        sessions: SessionProvider,
        threads: EpisodeThreads,
        environments: EnvironmentSource | None = None,
        sandboxes: SandboxSettings | None = None,
    ) -> None:
        self.threads = threads
        self._environments = environments
        self._sandboxes = sandboxes
        self.endings = EnvironmentEndings()
        self._workflow_class = workflow_class
        self._judge = judge
        self._sessions = sessions

    def begin(self, attempt: AttemptHandle) -> RunningAttempt:
        sessions, workflow_task = self._sessions, attempt.workflow_task

        async def on_service_loop(targets: list[str] | None) -> AjetTuner:
            return sessions.tuner(await attempt.open_session(targets))

        async def open_tuner(targets: list[str] | None) -> AjetTuner:
            opening = asyncio.run_coroutine_threadsafe(on_service_loop(targets), sessions.loop)
            return await asyncio.wrap_future(opening)

        async def early_ending(explained: bool) -> EarlyEnding | None:
            return attempt.ended_early(explained)

        async def ask_ending(explained: bool) -> EarlyEnding | None:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(early_ending(explained), sessions.loop))

        environment = None
        if self._environments is not None:
            environment = LeasedEnvironment(self._environments, workflow_task.task, workflow_task.episode_uuid)
        sandbox = None if self._sandboxes is None else LeasedSandbox(self._sandboxes, workflow_task.task.metadata)

        thread = self.threads.start(
            lambda: run_workflow(
                self._workflow_class,
                self._judge,
                workflow_task,
                open_tuner,
                judge_retries=sessions.config.ajet.rollout.episode_retries,
                ask_ending=ask_ending,
                on_judge=attempt.on_judge,
                environment=environment,
                sandbox=sandbox,
            )
        )
        return _AttemptInThread(self, thread, environment, sandbox)

    async def ready(self) -> None:
        """Threads need no preparation."""

    async def aclose(self) -> None:
        """Interrupt threads that are still running although their episodes have ended."""
        await asyncio.gather(self.threads.interrupt_all(), self.endings.wait())


class _AttemptInThread:
    def __init__(
        self,
        runner: ThreadRunner,
        thread: EpisodeThread[WorkflowResult],
        leased: LeasedEnvironment | None,
        sandbox: LeasedSandbox | None,
    ) -> None:
        self._runner = runner
        self._thread = thread
        self._leased = leased
        self._sandbox = sandbox

    @property
    def environment(self) -> EnvironmentRecord | None:
        return None if self._leased is None else self._leased.record

    async def result(self) -> WorkflowResult:
        return await asyncio.wrap_future(self._thread.result)

    async def where(self) -> str:
        return self._thread.stack()

    def release(self) -> None:
        runner, is_running = self._runner, not self._thread.result.done()
        runner.threads.process_state.restore(self._thread.name)
        if self._leased is not None and is_running:
            runner.endings.end(self._leased.close)  # its own thread may hang
        if self._sandbox is not None and is_running:
            runner.endings.end(self._sandbox.kill)
        runner.threads.release(self._thread)


class EpisodeThread(Generic[T]):
    """Runs one coroutine in a new daemon thread. `result` is set before the loop cleans up."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> None:
        self.result: Future[T] = Future()
        """Only the thread ends it: who waits for it may stop waiting."""
        self.result.set_running_or_notify_cancel()
        self.released_at: float | None = None
        """When the episode ended, on the monotonic clock; None while it is running."""
        self._work: Callable[[], Coroutine[Any, Any, T]] | None = work
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        self._interrupted = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Raises a `UserError` where the system gives no more threads or files: its episode would never end."""
        try:
            self._own_loop = new_loop()
            self._thread.start()
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"one more episode can't be started here: {error}\n    lower ajet.rollout.max_env_worker, or raise the "
                "limit of open files (`ulimit -n`) or of processes (`ulimit -u`, a container's pids limit)"
            ) from error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def name(self) -> str:
        return self._thread.name

    def cancel(self) -> None:
        """Cancel the coroutine at its next `await`, and all tasks of loops that user code runs in the thread."""
        with self._lock:
            self._cancelled = True
            if self._loop is not None and self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)
                cancel_loops(self._thread.ident, besides=self._loop)

    def interrupt(self, round_s: float = ROUND_S) -> None:
        """Raise `WorkflowInterrupted` in the thread. Takes effect when it next executes Python code.

        May have no effect (see `raise_in`): repeat it until the thread has ended.
        """
        raise_in(self._thread, WorkflowInterrupted, unless=lambda: self._interrupted, wake=self._wake, round_s=round_s)

    def _wake(self) -> None:
        """Loops of the thread that wait for events execute no Python code."""
        cancel_loops(self._thread.ident, besides=self._loop)
        if self._loop is not None:
            with suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(lambda: None)

    def stack(self) -> str:
        """Where the thread is and, if its loop waits, what the coroutine awaits."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        task = self._task
        awaited = awaited_stack(task.get_coro()) if task is not None else ""
        return "".join(traceback.format_stack(frame)) + awaited if frame is not None else ""

    def _main(self) -> None:
        loop = self._own_loop
        asyncio.set_event_loop(loop)
        try:
            try:
                self._run(loop)
            finally:
                end_loop(loop)
        except WorkflowInterrupted:
            self._interrupted = True
            if not self.result.done():
                self.result.set_exception(WorkflowFault("the thread was interrupted"))

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            value = run_with_pauses(loop, self._supervised(), (WorkflowInterrupted,))
        except WorkflowInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in user code must not end the thread unnoticed
            self._leave()
            self.result.set_exception(_for_the_service_loop(error))
        else:
            self._leave()
            self.result.set_result(value)

    async def _supervised(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), task
            if self._cancelled:
                task.cancel()
        work, self._work = self._work, None  # it leads back to this thread: an episode that has ended is freed at once
        assert work is not None
        return await work()

    def _leave(self) -> None:
        with self._lock:
            self._task = None


def _for_the_service_loop(error: BaseException) -> Exception:
    """An event loop that meets `SystemExit` or `KeyboardInterrupt` ends: there they are a fault like any other."""
    return error if isinstance(error, Exception) else WorkflowFault(f"{type(error).__name__}: {error}")


class EpisodeThreads:
    """All episode threads of a process. Used on the service loop only."""

    _frozen = False
    """Whether the process has frozen what it loaded by its first episode."""

    def __init__(self, max_lost: int = MAX_LOST, *, collect_garbage: bool = False, grace_s: float = GRACE_S) -> None:
        self._max_lost = max_lost
        self._grace_s = grace_s
        self._collect = collect_garbage
        self._collected_at: float | None = None
        self._released: set[EpisodeThread[Any]] = set()
        self._started = self._running = 0
        self._ending = False
        self.process_state = ProcessState()
        drop_complaints()

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> EpisodeThread[T]:
        """Run `work` in its own thread. Raises `LostThreadsError` if too many earlier ones never returned."""
        lost = self.lost
        if len(lost) > self._max_lost:
            raise LostThreadsError(
                f"{len(lost)} workflow threads hang; {self._max_lost} may. Set "
                "ajet.task_runner.wrapper_type: multi-processing, which runs each workflow in a process that can be "
                f"killed, or find out why they hang. The last one is here:\n{condensed(lost[-1].stack())}"
            )
        if not self._running:
            self.process_state.note_streams()
        self._started += 1
        thread = EpisodeThread(work, f"ajet-episode-{self._started}")
        thread.start()
        self._running += 1
        return thread

    def release(self, thread: EpisodeThread[Any]) -> None:
        """The episode has ended. If its thread hasn't: cancel it now, interrupt it later, finally count it as lost."""
        self._running -= 1
        if not self._running:
            self.process_state.restore_streams()
        thread.released_at = time.monotonic()
        if not thread.result.done():
            thread.cancel()
        self._released = {earlier for earlier in self._released if earlier.alive} | {thread}
        asyncio.get_running_loop().call_later(self._grace_s, self._interrupt_late, thread)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """After the first episode, all libraries are loaded: freeze what exists, so that it is never scanned again.

        Otherwise every full collection, including Python's own, stops all threads for 0.1 s or more.
        """
        first = self._collected_at is None
        if first or (self._collect and time.monotonic() - (self._collected_at or 0.0) > COLLECT_EVERY_S):
            gc.collect()
            self._collected_at = time.monotonic()
        if first and not EpisodeThreads._frozen:  # once per process: garbage of a later run must be collected
            EpisodeThreads._frozen = True
            gc.freeze()

    async def interrupt_all(self) -> None:
        """Interrupt all threads that outlived their episodes, repeatedly, for one grace period. Then leave them: they
        end with the process. First, those that were cancelled may close what they have open."""
        self._ending = True
        began = time.monotonic()
        while self._outlived() and time.monotonic() < began + self._grace_s / 4:
            await asyncio.sleep(self._grace_s / 40)
        give_up = began + self._grace_s
        while (alive := self._outlived()) and time.monotonic() < give_up:
            for thread in alive:
                if time.monotonic() < give_up:
                    thread.interrupt(_LAST_ROUND_S)
            await asyncio.sleep(_AGAIN_S)
        if alive:
            log.warning(
                "workflow threads that can't be interrupted are left behind: %d%s",
                *(len(alive), at_user_line(alive[-1].stack())),
            )

    def _outlived(self) -> list[EpisodeThread[Any]]:
        return [thread for thread in self._released if thread.alive]

    @property
    def lost(self) -> list[EpisodeThread[Any]]:
        """Threads that outlived their episode by two grace periods, latest last."""
        before = time.monotonic() - 2 * self._grace_s
        gone = [thread for thread in self._released if thread.alive and (thread.released_at or before) < before]
        return sorted(gone, key=lambda thread: thread.released_at or before)

    def _interrupt_late(self, thread: EpisodeThread[Any]) -> None:
        if thread.alive and not self._ending:
            stack = thread.stack()
            log.warning(
                "%s is still running %.0f s after its episode ended; interrupting it%s",
                *(thread.name, self._grace_s, at_user_line(stack)),
                extra={TRACEBACK: stack},
            )
            self._interrupt_again(thread)

    def _interrupt_again(self, thread: EpisodeThread[Any]) -> None:
        """Once may not be enough: for example, Python discards exceptions raised inside a finaliser."""
        if thread.alive and not self._ending:
            thread.interrupt()
            asyncio.get_running_loop().call_later(self._grace_s, self._interrupt_again, thread)
