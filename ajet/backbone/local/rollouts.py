"""`Rollouts`: samples the groups of each step in order, and with `rollout.max_staleness` ahead of their training.

With `max_staleness: 0`, a step's episodes begin after the previous update, and end before their own update begins. With
N > 0, the episodes of step s begin as soon as those of step s - 1 have ended and the engine serves version s - 1 - N or
a later one, while earlier steps are still being trained. Step v creates version v, so no trained token is more than N
versions older than the weights that it updates.

The work after a step keeps its order, as all of it waits only for the step's own batch:

1. the update, then `pause`, `load_weights`, `resume`: replies in flight end under the weights they began with, and the
   episodes of later steps go on with the next reply;
2. the validation: no update happens meanwhile, so it measures one version; later episodes share the engine with it;
3. the checkpoint, whose reader state is the one after this step's batch. Batches sampled ahead are not part of
   it: a resumed run samples them again.

A run that ends (last step, early stop, error, Ctrl-C) stops sampling ahead. Those episodes are neither recorded nor
trained.

`Replay` keeps the groups of the last steps and trains them once more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ajet.backbone.metrics import FAULTS, is_success, played
from ajet.backbone.training_settings import credit_settings
from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.schema.episode import EpisodeGroup
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import Curriculum, TaskStream
from ajet.trainer.credit import ZeroVariance

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.progress import Progress
    from ajet.task_runner.runtime import Runtime


FILE = "replay.msgpack"


@dataclass(frozen=True, slots=True)
class _Kept:
    step: int
    """The step in which its episodes were sampled."""
    group: EpisodeGroup


@dataclass(slots=True)
class Replay:
    """The groups of at most `max_age` steps before the present one, of which `groups` are trained again per step."""

    groups: int
    max_age: int
    seed: int
    _kept: deque[_Kept] = field(default_factory=deque)

    @classmethod
    def from_config(cls, config: Config) -> Replay:
        common = config.ajet.trainer_common
        return cls(common.algorithm.replay.groups, common.algorithm.replay.max_age, common.seed)

    def draw(self, step: int) -> list[EpisodeGroup]:
        """The past groups that this step trains, in the order in which they were sampled."""
        kept = self._young(step)
        order = np.random.default_rng([self.seed, step]).permutation(len(kept))
        return [kept[index].group for index in sorted(order[: self.groups].tolist())]

    def add(self, step: int, groups: Sequence[EpisodeGroup]) -> None:
        """Record a complete step: keep its groups that had a gradient, and drop groups that are too old."""
        if not self.groups:
            return
        self._kept.extend(
            _Kept(step, EpisodeGroup(group.group_id, group.task_id, list(group.episodes))) for group in groups
        )
        self._kept = deque(self._young(step + 1))

    def __len__(self) -> int:
        return len(self._kept)

    def write(self, folder: Path) -> None:
        if self.groups:
            stored = [
                {
                    "step": kept.step,
                    "group_id": kept.group.group_id,
                    "task_id": kept.group.task_id,
                    "episodes": [encode_episode(episode) for episode in kept.group.episodes],
                }
                for kept in self._kept
            ]
            (folder / FILE).write_bytes(msgspec.msgpack.encode(stored))

    def read(self, folder: Path) -> None:
        """Continue with a checkpoint's groups; a checkpoint of a run without replay has none."""
        if self.groups and (folder / FILE).is_file():
            stored: list[dict[str, Any]] = msgspec.msgpack.decode((folder / FILE).read_bytes())
            self._kept = deque(
                _Kept(
                    int(one["step"]),
                    EpisodeGroup(one["group_id"], one["task_id"], [decode_episode(data) for data in one["episodes"]]),
                )
                for one in stored
            )

    def _young(self, step: int) -> list[_Kept]:
        return [kept for kept in self._kept if 0 < step - kept.step <= self.max_age]


RESAMPLE_ROUNDS = 10
"""`zero_variance_groups: resample`: how many batches of tasks are tried before a step goes on with what it has. DAPO's
published script allows as many."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's groups, and the position in the task stream after them."""

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
        """`last`: the run's last step. `teaches`: whether a group has a gradient."""
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
        """Sampled steps in order; an exception is the last item."""
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
        """Note that the engine serves this version now."""
        if self._drawing is not None:
            self._runtime.run(self._note_version(version))

    def stop(self) -> None:
        """Stop sampling. Episodes in flight end with the runtime."""
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
            if self._runtime.external is not None:
                fresh = await self._runtime.external.next_groups(len(tasks), step)
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
