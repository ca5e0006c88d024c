"""`Rollouts`: the groups of each step, drawn in order, and with `rollout.max_staleness` ahead of their training.

With `max_staleness: 0`, a step's episodes begin when it is their turn, and end before its update begins. With N > 0,
the episodes of step s begin as soon as those of step s - 1 have ended and the engine serves version s - 1 - N or a
later one, while earlier steps are still being trained. Version v is what step v made, so no trained token is more than
N versions older than the weights that it updates.

What follows a step keeps its order, as all of it waits for the step's own batch only:

1. the update, then `pause`, `load_weights`, `resume`: replies in flight end under the weights they began with, and the
   episodes of later steps go on with the next reply;
2. the validation: no update happens meanwhile, so it measures one version; later episodes share the engine with it;
3. the checkpoint, whose reader state is the one after this step's batch. What was drawn ahead is no part of it: a
   resumed run draws those batches again.

A run that ends (last step, early stop, error, Ctrl-C) stops what is being drawn ahead. Those episodes are neither
recorded nor trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ajet.backbone.episode_metrics import FAULTS, is_success, played
from ajet.backbone.training_settings import credit_settings
from ajet.credit import ZeroVariance
from ajet.schema.episode import EpisodeGroup
from ajet.schema.task import Task
from ajet.task_reader.curriculum import Curriculum
from ajet.task_reader.stream import TaskStream

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.progress import Progress
    from ajet.runtime.runtime import Runtime

RESAMPLE_ROUNDS = 3
"""`zero_variance_groups: resample`: how many batches of tasks are tried before a step goes on with what it has."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's groups, and where the tasks stood when they had ended."""

    groups: list[EpisodeGroup]
    reader_state: dict[str, Any]
    metrics: dict[str, float]


class Rollouts:
    """Draws batches of groups. `take` and the other methods are called from the thread that trains."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        stream: TaskStream,
        progress: Progress,
        teaches: Callable[[EpisodeGroup], bool],
        last: int,
    ) -> None:
        """`last`: the run's last step. `teaches`: whether anything can be learnt from a group."""
        self._runtime = runtime
        self._stream = stream
        self._progress = progress
        self._teaches = teaches
        self._last = last
        self._ahead: int = config.ajet.rollout.max_staleness
        self._repeat: int = config.ajet.rollout.num_repeat
        self._wanted: int = config.ajet.data.train_batch_size
        self._resample = credit_settings(config).zero_variance is ZeroVariance.RESAMPLE
        self._threshold = config.ajet.task_judge.success_threshold
        self._version = 0
        self._changed = asyncio.Condition()
        self._ready: asyncio.Queue[Drawn | Exception] = asyncio.Queue()
        """In the order of the steps; an exception ends it."""
        self._drawing: Future[None] | None = None

    def take(self, step: int) -> Drawn:
        """The groups of this step, which is the one after the last that was taken."""
        if not self._ahead:
            return self._runtime.run(self._draw(step))
        if self._drawing is None:
            self._version = step - 1
            self._drawing = self._runtime.submit(self._draw_ahead(step))
        began = time.perf_counter()
        self._progress.phase("rollout")
        drawn = self._runtime.run(self._ready.get())
        if isinstance(drawn, Exception):
            raise drawn
        drawn.metrics["time/rollout_wait"] = time.perf_counter() - began
        return drawn

    def trained(self, version: int) -> None:
        """The engine serves this version now."""
        if self._drawing is not None:
            self._runtime.run(self._note_version(version))

    def stop(self) -> None:
        """Draw nothing more. Episodes that are under way end with the runtime."""
        if self._drawing is not None:
            self._drawing.cancel()

    # ------------------------------------------------------------ on the service loop

    async def _note_version(self, version: int) -> None:
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def _draw_ahead(self, first: int) -> None:
        try:
            for step in range(first, self._last + 1):
                async with self._changed:
                    await self._changed.wait_for(lambda: step - 1 - self._ahead <= self._version)  # noqa: B023
                self._ready.put_nowait(await self._draw(step))
        except Exception as error:  # noqa: BLE001 - `take` raises it in its turn
            self._ready.put_nowait(error)

    async def _draw(self, step: int) -> Drawn:
        """A batch of groups. With `resample`, further tasks replace groups whose rewards are all equal."""
        began = time.perf_counter()
        groups: list[EpisodeGroup] = []
        ran: list[Task] = []
        teaching = 0
        for _ in range(RESAMPLE_ROUNDS if self._resample else 1):
            tasks: list[Task] = self._stream.next_batch()
            if not self._ahead:
                self._progress.phase("rollout", len(tasks) * self._repeat)
            if self._runtime.outside is not None:
                fresh = await self._runtime.outside.next_groups(len(tasks), step)
            else:
                fresh = await self._runtime.pool.run_groups(tasks, step=step, earlier=ran)
            groups += fresh
            ran += tasks
            self._note_solved(fresh)
            teaching += sum(self._teaches(group) for group in fresh if group.complete)
            if teaching >= self._wanted:
                break
        metrics: dict[str, float] = {"train/epoch": self._stream.epoch, "time/rollout": time.perf_counter() - began}
        if isinstance(self._stream, Curriculum):
            metrics |= self._stream.metrics()
        return Drawn(groups, self._stream.state_dict(), metrics)

    def _note_solved(self, groups: Sequence[EpisodeGroup]) -> None:
        """Tell a curriculum how often the tasks were solved. Faults are no tries; other failures are failed ones."""
        if not isinstance(self._stream, Curriculum):
            return
        for group in groups:
            ended = played([*group.episodes, *group.failed])
            tries = [is_success(episode, self._threshold) for episode in ended if episode.status not in FAULTS]
            self._stream.note(group.task_id, sum(tries), len(tries))
