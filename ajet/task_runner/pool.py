"""`RolloutPool`: many episodes, at most N at a time, alone or in groups per task. Doesn't know which backbone uses it.

A failed episode never ends the run: it is returned as data. Only an episode that failed by a fault of the engine or
the infrastructure is replaced; to replace what the policy may have caused would leave only the survivors. A group with
too few usable episodes is marked incomplete, and incomplete groups are never trained.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import concurrently
from ajet.schema.resources import PromptSet, read_prompts
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.runner import TaskRunner

if TYPE_CHECKING:
    from ajet.config import Config

OnEpisode = Callable[[Episode], None]
"""Called on the service loop for every episode that ends, including failed and cancelled ones. Must be quick."""


class RolloutPool:
    """Runs episodes, at most `parallel` at a time. Lives on the service loop."""

    def __init__(
        self,
        runner: TaskRunner,
        config: Config,
        *,
        on_episode: OnEpisode = lambda episode: None,
        on_start: Callable[[WorkflowTask], None] = lambda workflow_task: None,
        parallel: int | None = None,
    ) -> None:
        """`parallel` overrides `rollout.max_env_worker`. While debugging, it is 1."""
        self.runner = runner
        self._late_judge = runner.late_judge
        self._rollout = config.ajet.rollout
        self._val_repeat = config.ajet.rollout.val_kwargs.num_repeat
        templates = config.ajet.prompt_tuning.templates
        self._prompts = read_prompts(templates) if templates else None
        self._on_episode = on_episode
        self._on_start = on_start
        self.parallel = 1 if debugging() else parallel or self._rollout.max_env_worker
        self._slots = asyncio.Semaphore(self.parallel)
        self._stops: dict[str, asyncio.Event] = {}
        """The stop signals by episode, running or waiting. The episodes of a group share one."""

    async def run_episode(
        self,
        task: Task,
        *,
        group_id: str = "",
        batch_index: int = 0,
        repeat: int = 0,
        step: int = 0,
        occurrence: int = 0,
        validation: bool = False,
        stop: asyncio.Event | None = None,
        in_group: bool = False,
        prompts: PromptSet | None = None,
    ) -> Episode:
        """Run one episode of a task when a slot is free. Setting `stop` ends it, even while it is waiting.

        `prompts`: its prompt templates; by default those of the config.

        `in_group`: if the judge decides about whole groups, the reward only stands in for the one to come.
        """
        stop = stop or asyncio.Event()
        workflow_task = WorkflowTask(
            task=task,
            task_id=task.task_id,
            env_type=task.env_type,
            episode_uuid=uuid.uuid4().hex,
            task_batch_index=batch_index,
            task_thread_index=repeat,
            task_tag=str(task.metadata.get("tag") or ""),
            validation=validation,
            prompts=prompts or self._prompts,
        )
        self._stops[workflow_task.episode_uuid] = stop
        waited = time.monotonic()
        try:
            async with self._slot(stop):
                queued_s = time.monotonic() - waited
                if not stop.is_set():
                    self._on_start(workflow_task)
                episode = await self.runner.run(
                    workflow_task, group_id=group_id, step=step, occurrence=occurrence, stop=stop
                )
            episode.timings["queue"] = queued_s
            await self.conclude(episode, stop, in_group=in_group)
        finally:
            del self._stops[workflow_task.episode_uuid]
        return episode

    async def conclude(self, episode: Episode, stop: asyncio.Event, *, in_group: bool) -> None:
        """Let the judge decide about an episode that it judges by itself, and report its end unless it still waits."""
        late = self._late_judge
        if late is not None and late.waits(episode) and not (in_group and not await late.per_episode()):
            await late.settle([episode], stop)
        if late is None or not late.waits(episode):
            self._on_episode(episode)

    async def judges_groups(self) -> bool:
        """Whether the judge compares the episodes of a group, which must then be played together."""
        return self._late_judge is not None and await self._late_judge.compares()

    async def settle_group(self, name: str, episodes: Sequence[Episode], others: Sequence[Episode]) -> None:
        """Let the judge decide about a group, if it decides about groups. `others` are no part of it."""
        late = self._late_judge
        if late is None:
            return
        waiting = [episode for episode in (*episodes, *others) if late.waits(episode)]
        if not waiting:
            return
        self._stops[name] = stop = asyncio.Event()
        try:
            late.forget(others)
            await late.settle(episodes, stop)
        finally:
            del self._stops[name]
        for episode in waiting:
            self._on_episode(episode)

    async def run_group(
        self,
        task: Task,
        *,
        group_id: str = "",
        num_repeat: int | None = None,
        batch_index: int = 0,
        step: int = 0,
        occurrence: int = 0,
        validation: bool = False,
        prompts: PromptSet | None = None,
    ) -> EpisodeGroup:
        """Run `num_repeat` episodes of a task (default: the config's), whose rewards will be compared.

        An episode that failed by a fault is replaced while the group needs it, at most `num_repeat` times; one that
        `failure_reward` drops makes the group smaller. With `enable_oversample`, `submit_oversample_multiplier` times
        as many are started, and `oversample_keep` decides which of them make the group. Validation groups are neither
        refilled nor oversampled.

        `occurrence`: of the groups of this task in the step, which one this is. Each draws replies of its own.
        """
        size = num_repeat or (self._val_repeat if validation else self._rollout.num_repeat)
        group_id = group_id or uuid.uuid4().hex
        play = partial(
            self.run_episode,
            task,
            group_id=group_id,
            batch_index=batch_index,
            step=step,
            occurrence=occurrence,
            validation=validation,
            in_group=True,
            prompts=prompts,
        )
        group = _Group(self, play, group_id, task.task_id, size=size, needed=0, first=size)
        if not validation:
            needed = self._rollout.min_group_size
            group.needed = None if needed is None else min(needed, size)
            group.refills = size
            if self._rollout.enable_oversample:
                group.first = math.ceil(size * self._rollout.submit_oversample_multiplier)
                group.keep_first_ended = self._rollout.oversample_keep == "first_ended"
        return await group.run()

    async def run_groups(
        self,
        tasks: Sequence[Task],
        *,
        step: int = 0,
        num_repeat: int | None = None,
        validation: bool = False,
        earlier: Sequence[Task] = (),
    ) -> list[EpisodeGroup]:
        """A batch: one group per task, in the order of `tasks`. `earlier`: the tasks that the step has run already."""
        seen = Counter(task.task_id for task in earlier)
        work = []
        for index, task in enumerate(tasks, len(earlier)):
            work.append(
                self.run_group(
                    task,
                    num_repeat=num_repeat,
                    batch_index=index,
                    step=step,
                    occurrence=seen[task.task_id],
                    validation=validation,
                    group_id=f"{step}-{index}-{task.task_id}",
                )
            )
            seen[task.task_id] += 1
        return await concurrently(work)

    async def run_episodes(self, tasks: Sequence[Task]) -> list[Episode]:
        """One episode per task, in the order of `tasks`."""
        return await concurrently(self.run_episode(task, batch_index=index) for index, task in enumerate(tasks))

    @asynccontextmanager
    async def _slot(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Hold one of the slots. A stopped episode doesn't need one."""
        if not self._slots.locked():
            async with self._slots:
                yield
            return
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
class _Group:
    """One group under way."""

    pool: RolloutPool
    play: Callable[..., Coroutine[Any, Any, Episode]]
    """Runs one of its episodes, given `repeat` and `stop`."""
    group_id: str
    task_id: str
    size: int
    """Episodes that make the group; those that are dropped among them are missing."""
    needed: int | None
    """Usable episodes that make it trainable. None: all that aren't dropped, at least 2."""
    first: int
    """Episodes started at once."""
    refills: int = 0
    """Episodes that may be started for those that ended by a fault."""
    keep_first_ended: bool = False
    """`oversample_keep`."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    played: list[Episode] = field(default_factory=list)
    """Ended, by anything but a fault. In the order in which they ended."""
    faults: list[Episode] = field(default_factory=list)
    cancelled: list[Episode] = field(default_factory=list)
    _decided: bool = False
    """It was stopped because nothing that still ran could change it."""

    async def run(self) -> EpisodeGroup:
        running: dict[asyncio.Task[Episode], int] = {}
        started = 0
        try:
            while True:
                for _ in range(self._to_start(started, len(running))):
                    running[asyncio.create_task(self.play(repeat=started, stop=self.stop))] = started
                    started += 1
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del running[task]
                    self._sort(task.result())
                if self._is_decided(started, running.values()):
                    self._decided = self._decided or not self.cancelled
                    self.stop.set()
        finally:
            self.stop.set()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await self._judge()
        return self._group()

    async def _judge(self) -> None:
        """Settle the rewards that are still missing. No judge is asked once the run is being ended."""
        chosen = [] if self.cancelled and not self._decided else self._chosen()
        others = [episode for episode in self.played if not any(episode is one for one in chosen)]
        await self.pool.settle_group(f"group {self.group_id}", chosen, others)

    def _sort(self, episode: Episode) -> None:
        if episode.status is EpisodeStatus.CANCELLED:
            self.cancelled.append(episode)
        elif episode.status in (EpisodeStatus.ENGINE_ERROR, EpisodeStatus.ENVIRONMENT_ERROR):
            self.faults.append(episode)
        else:
            self.played.append(episode)

    def _group(self) -> EpisodeGroup:
        chosen = self._chosen()
        kept = [episode for episode in chosen if episode.usable]
        others = [episode for episode in self.played if not any(episode is one for one in kept)]
        return EpisodeGroup(
            self.group_id,
            self.task_id,
            episodes=sorted(kept, key=lambda episode: episode.repeat),
            failed=[*others, *self.faults, *self.cancelled],
            complete=len(kept) >= self._needed(chosen) and not _judge_failed(chosen),
        )

    def _to_start(self, started: int, running: int) -> int:
        if not started:
            return 0 if self.stop.is_set() else self.first
        chosen = self._chosen()
        if self.stop.is_set() or _judge_failed(chosen):
            return 0
        lacking = self._needed(chosen) - _usable(chosen) - running
        return max(0, min(lacking, self._replaceable(started)))

    def _replaceable(self, started: int) -> int:
        """Faults that may still be replaced."""
        refilled = started - self.first
        return min(len(self.faults), self.refills) - refilled

    def _needed(self, chosen: Sequence[Episode]) -> int:
        """Usable episodes that make the group trainable."""
        if self.needed is not None:
            return self.needed
        dropped = len(chosen) - _usable(chosen)
        return max(min(2, self.size), self.size - dropped)

    def _is_decided(self, started: int, running: Collection[int]) -> bool:
        """Whether nothing that still runs can change what is trained."""
        if self.cancelled:
            return True  # the run is being ended
        chosen = self._chosen()
        if len(chosen) < self.size:  # hopeless, if faults can't be replaced any more
            possible = _usable(chosen) + len(running) + max(0, self._replaceable(started))
            return bool(self.faults) and possible < self._needed(chosen)
        if self.keep_first_ended:
            return _rewards_differ(chosen)
        return min(running, default=math.inf) > max(episode.repeat for episode in chosen)

    def _chosen(self) -> list[Episode]:
        """The episodes that make the group: the first `size`, dropped ones included. None is preferred for its end.

        With `keep_first_ended`, the first to end; if these all have one reward, a later one that differs takes the last
        one's place.
        """
        size = self.size
        if not self.keep_first_ended:
            return sorted(self.played, key=lambda episode: episode.repeat)[:size]
        first, later = self.played[:size], self.played[size:]
        if first and not _rewards_differ(first):
            rewards = {episode.reward for episode in first if episode.usable}
            other = next((episode for episode in later if episode.usable and episode.reward not in rewards), None)
            if other is not None:
                first[-1] = other
        return first


def _rewards_differ(episodes: Sequence[Episode]) -> bool:
    return len({episode.reward for episode in episodes if episode.usable}) > 1


def _usable(episodes: Sequence[Episode]) -> int:
    return sum(episode.usable for episode in episodes)


def _judge_failed(episodes: Sequence[Episode]) -> bool:
    return any(episode.status is EpisodeStatus.JUDGE_ERROR for episode in episodes)
