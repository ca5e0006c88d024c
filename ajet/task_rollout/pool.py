"""`RolloutPool`: many episodes, at most N at a time, alone or in groups per task. Doesn't know which backbone uses it.

A failed episode never ends the run: it is returned as data. A group with too few usable episodes is refilled; if that
doesn't help, it is marked incomplete, and incomplete groups are never trained.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.runner import TaskRunner

if TYPE_CHECKING:
    from ajet.config import Config

T = TypeVar("T")
OnEpisode = Callable[[Episode], None]
"""Called on the service loop for every episode that ends, including failed and cancelled ones. Must be quick."""


class RolloutPool:
    """Runs episodes, at most `parallel` at a time. Lives on the service loop."""

    def __init__(
        self,
        runner: TaskRunner,
        config: Config,
        *,
        on_episode: OnEpisode | None = None,
        on_start: Callable[[WorkflowTask], None] | None = None,
        parallel: int | None = None,
    ) -> None:
        """`parallel` overrides `rollout.max_env_worker`. While debugging, it is 1."""
        self.runner = runner
        self._rollout = config.ajet.rollout
        self._val_repeat = config.ajet.rollout.val_kwargs.num_repeat
        self._on_episode = on_episode
        self._on_start = on_start
        self.parallel = 1 if debugging() else parallel or self._rollout.max_env_worker
        self._slots = asyncio.Semaphore(self.parallel)
        self._stops: dict[str, asyncio.Event] = {}
        """By episode, running or waiting. The episodes of a group share one."""

    async def run_episode(
        self,
        task: Task,
        *,
        group_id: str = "",
        batch_index: int = 0,
        repeat: int = 0,
        step: int = 0,
        validation: bool = False,
        stop: asyncio.Event | None = None,
    ) -> Episode:
        """Run one episode of a task when a slot is free. Setting `stop` ends it, even while it is waiting."""
        stop = stop or asyncio.Event()
        workflow_task = WorkflowTask(
            task=task,
            task_id=task.task_id,
            env_type=task.env_type,
            episode_uuid=uuid.uuid4().hex,
            task_batch_index=batch_index,
            task_thread_index=repeat,
            task_tag=str(task.metadata.get("tag") or ""),
        )
        self._stops[workflow_task.episode_uuid] = stop
        waited = time.monotonic()
        try:
            async with self._slot(stop):
                queued_s = time.monotonic() - waited
                if self._on_start is not None and not stop.is_set():
                    self._on_start(workflow_task)
                episode = await self.runner.run(
                    workflow_task, validation=validation, group_id=group_id, step=step, stop=stop
                )
        finally:
            del self._stops[workflow_task.episode_uuid]
        episode.timings["queue"] = queued_s
        if self._on_episode is not None:
            self._on_episode(episode)
        return episode

    async def run_group(
        self,
        task: Task,
        *,
        group_id: str = "",
        num_repeat: int | None = None,
        batch_index: int = 0,
        step: int = 0,
        validation: bool = False,
    ) -> EpisodeGroup:
        """Run `num_repeat` episodes of a task (default: the config's), whose rewards will be compared.

        While the group has fewer than `min_group_size` usable episodes, failed ones are replaced, at most `num_repeat`
        times. With `enable_oversample`, `submit_oversample_multiplier` times as many are started, and the group ends
        as soon as `num_repeat` are usable and their rewards differ. Validation groups are neither refilled nor
        oversampled.
        """
        size = num_repeat or (self._val_repeat if validation else self._rollout.num_repeat)
        plan = _GroupPlan(size=size, needed=size, start=size, refills=0)
        if not validation:
            plan.refills = size
            plan.needed = min(self._rollout.min_group_size or size, size)
            if self._rollout.enable_oversample:
                plan.start = math.ceil(size * self._rollout.submit_oversample_multiplier)
        return await _Group(self, task, group_id or uuid.uuid4().hex, plan, batch_index, step, validation).run()

    async def run_groups(
        self,
        tasks: Sequence[Task],
        *,
        step: int = 0,
        num_repeat: int | None = None,
        validation: bool = False,
    ) -> list[EpisodeGroup]:
        """A batch: one group per task, in the order of `tasks`."""
        return await _all(
            self.run_group(
                task,
                num_repeat=num_repeat,
                batch_index=index,
                step=step,
                validation=validation,
                group_id=f"{step}-{index}-{task.task_id}",
            )
            for index, task in enumerate(tasks)
        )

    async def run_episodes(self, tasks: Sequence[Task], *, validation: bool = False) -> list[Episode]:
        """One episode per task, in the order of `tasks`."""
        return await _all(
            self.run_episode(task, batch_index=index, validation=validation) for index, task in enumerate(tasks)
        )

    @asynccontextmanager
    async def _slot(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Hold one of the slots. A stopped episode doesn't need one."""
        slot = asyncio.create_task(self._slots.acquire())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({slot, stopped}, return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            stopped.cancel()
            slot.cancel()
            await asyncio.gather(slot, stopped, return_exceptions=True)
            if not slot.cancelled():
                self._slots.release()

    @property
    def running(self) -> int:
        """How many episodes are running or waiting for a slot."""
        return len(self._stops)

    def stop_all(self) -> None:
        """End every episode, running or waiting, as `cancelled`."""
        for stop in list(self._stops.values()):
            stop.set()


@dataclass(slots=True)
class _GroupPlan:
    size: int
    """How many usable episodes the group is meant to have, at most."""
    needed: int
    """How many usable episodes it needs to be trained."""
    start: int
    """How many episodes start immediately."""
    refills: int
    """How many episodes may replace failed ones."""


@dataclass(slots=True)
class _Group:
    """One group, running."""

    pool: RolloutPool
    task: Task
    group_id: str
    plan: _GroupPlan
    batch_index: int
    step: int
    validation: bool
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    usable: list[Episode] = field(default_factory=list)
    """In the order in which they ended."""
    failed: list[Episode] = field(default_factory=list)

    async def run(self) -> EpisodeGroup:
        running: set[asyncio.Task[Episode]] = set()
        started = 0
        try:
            while True:
                for _ in range(self._to_start(started, len(running))):
                    running.add(asyncio.create_task(self._episode(started)))
                    started += 1
                if not running:
                    break
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    episode = task.result()
                    (self.usable if episode.usable else self.failed).append(episode)
                if self._is_decided(started, len(running)):
                    self.stop.set()
        finally:
            self.stop.set()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        kept = self._kept()
        return EpisodeGroup(
            self.group_id,
            self.task.task_id,
            episodes=sorted(kept, key=lambda episode: episode.repeat),
            failed=self.failed,
            complete=len(kept) >= self.plan.needed,
        )

    def _to_start(self, started: int, running: int) -> int:
        if self.stop.is_set():
            return 0
        if not started:
            return self.plan.start
        lacking = self.plan.needed - len(self.usable) - running
        refills_left = self.plan.start + self.plan.refills - started
        return max(0, min(lacking, refills_left))

    def _is_decided(self, started: int, running: int) -> bool:
        """Whether the episodes still running can't change what is trained."""
        if any(episode.status is EpisodeStatus.CANCELLED for episode in self.failed):
            return True  # the run is ending
        if len(self.usable) >= self.plan.size:
            return self.plan.start == self.plan.size or _rewards_differ(self.usable)
        refills_left = self.plan.start + self.plan.refills - started
        return len(self.usable) + running + refills_left < self.plan.needed

    def _kept(self) -> list[Episode]:
        """The first to end. If they all have the same reward, a later one with another reward replaces the last."""
        first, later = self.usable[: self.plan.size], self.usable[self.plan.size :]
        if first and not _rewards_differ(first):
            other = next((episode for episode in later if episode.reward != first[0].reward), None)
            if other is not None:
                first[-1] = other
        return first

    async def _episode(self, repeat: int) -> Episode:
        return await self.pool.run_episode(
            self.task,
            group_id=self.group_id,
            batch_index=self.batch_index,
            repeat=repeat,
            step=self.step,
            validation=self.validation,
            stop=self.stop,
        )


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. An error that ends the run (`UserError`, `LostThreadsError`) cancels the others first, and
    is raised on its own."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def _rewards_differ(episodes: list[Episode]) -> bool:
    return len({episode.reward for episode in episodes}) > 1
