"""`GroupRunner`: what a Ray process has for running groups of episodes.

The same `Runtime` as with every backbone (service loop, gateway, tokenizer, user's classes), on the engine that verl or
Trinity brings. Groups, retries and failures are the pool's; credit is computed elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from ajet.backbone.ray.collector import COLLECTOR
from ajet.backbone.ray.payload import RunPayload
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.schema.call_tree import Sample
from ajet.schema.episode import Episode, EpisodeGroup
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.engine.base import Engine


class GroupRunner:
    """One per process.

    `workers`: processes that share `rollout.max_env_worker`.
    """

    def __init__(self, run: RunPayload, make_engine: Callable[[Config], Engine], *, workers: int = 1) -> None:
        run.enter()
        self.config = run.load_config()
        self.collector = ray.get_actor(COLLECTOR)
        self._make_engine = make_engine
        self._parallel = max(1, self.config.ajet.rollout.max_env_worker // workers)
        self._tracker_settings = TrackerSettings.from_config(self.config)
        self._opening: asyncio.Task[Runtime] | None = None

    async def run_group(self, task: Task, **options: Any) -> EpisodeGroup:
        """Run a group, and hand it to the collector. `options` are those of `RolloutPool.run_group`."""
        runtime = await self.runtime()
        group = await asyncio.wrap_future(runtime.submit(runtime.pool.run_group(task, **options)))
        await self.collector.add.remote(group.group_id, group, task)
        return group

    def samples(self, episode: Episode) -> list[Sample]:
        """The episode's linear samples."""
        return episode_samples(episode, self._tracker_settings)[0]

    async def open(self) -> None:
        """Get ready for episodes: everything that is opened once. Raises a UserError."""
        await self.runtime()

    async def runtime(self) -> Runtime:
        """Opened by the first caller."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        return await asyncio.shield(self._opening)

    def _open(self) -> Runtime:
        return Runtime(self.config, make_engine=self._make_engine, parallel=self._parallel).start()
