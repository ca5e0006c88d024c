"""Where a workflow's code runs. `ThreadVenue`: in this process, a thread for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from ajet.schema.task import WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.supplies import Supplies
from ajet.task_runner.threads import EpisodeThread, WorkflowThreads
from ajet.task_runner.verdict import Verdict, perform
from ajet.workflow import Workflow

if TYPE_CHECKING:
    from ajet.session import EpisodeSession

OpenSession = Callable[[list[str] | None], Awaitable["EpisodeSession"]]
"""On the service loop: opens the attempt's session, given the workflow's `trainable_targets`."""


class Performance(Protocol):
    """One attempt's code at work. Used on the service loop only."""

    async def verdict(self) -> Verdict:
        """Wait for workflow and judge. Cancelling the wait leaves the code running: `release` ends it."""
        ...

    async def where(self) -> str:
        """Where the code is now, for the record of a deadline."""
        ...

    def release(self) -> None:
        """The episode is over: end whatever of it still runs. Returns at once."""
        ...


class Venue(Protocol):
    """A kind of place for performances."""

    async def ready(self) -> None:
        """Wait until performances can begin: it does not count as an episode's time. Raises a `UserError`."""
        ...

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession) -> Performance: ...

    async def aclose(self) -> None: ...


class ThreadVenue:
    """In this process. The workflow may block; it must not crash the interpreter, nor hang too often."""

    def __init__(
        self, workflow_class: type[Workflow], judge: BaseJudge | None, supplies: Supplies, threads: WorkflowThreads
    ) -> None:
        self.threads = threads
        self._workflow_class = workflow_class
        self._judge = judge
        self._supplies = supplies

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession) -> Performance:
        async def open_tuner(targets: list[str] | None) -> Any:
            opening = asyncio.run_coroutine_threadsafe(self._open(open_session, targets), self._supplies.loop)
            return await asyncio.wrap_future(opening)

        retries = self._supplies.config.ajet.rollout.episode_retries
        thread = self.threads.start(
            lambda: perform(self._workflow_class, self._judge, workflow_task, open_tuner, judge_retries=retries)
        )
        return _ThreadPerformance(thread, self.threads)

    async def ready(self) -> None:
        """A thread is always at hand."""

    async def aclose(self) -> None:
        """Threads whose episodes are over and that still go on are interrupted now."""
        await self.threads.interrupt_all()

    async def _open(self, open_session: OpenSession, targets: list[str] | None) -> Any:
        return self._supplies.tuner(await open_session(targets))


class _ThreadPerformance:
    def __init__(self, thread: EpisodeThread[Verdict], threads: WorkflowThreads) -> None:
        self._thread = thread
        self._threads = threads

    async def verdict(self) -> Verdict:
        return await asyncio.shield(asyncio.wrap_future(self._thread.result))

    async def where(self) -> str:
        return self._thread.stack()

    def release(self) -> None:
        self._threads.release(self._thread)
