"""Trinity's explorer and trainer, with an ear for what goes wrong.

Trinity logs an exception in a step and then ends as if its work was done; ours tell the board, and the driver fails the
run by the reason. Being classes of this package, they also bring our code into Trinity's processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
import trinity.trainer.trainer as trainer_module
from trinity.common.config import Config
from trinity.common.constants import SyncStyle
from trinity.common.experience import Experience
from trinity.explorer.explorer import Explorer
from trinity.trainer.trainer import Trainer

from ajet.backbone.ray.collector import BOARD
from ajet.backbone.ray.trinity.plugin import on_cpu
from ajet.backbone.ray.trinity.rows import VERSIONS

LOOK_S = 0.2
"""Seconds between looks at the policy version while the explorer waits for it."""


@asynccontextmanager
async def _told(who: str) -> AsyncIterator[None]:
    """Tell the board what went wrong; the end of tasks or rows is no fault."""
    try:
        yield
    except (StopAsyncIteration, asyncio.CancelledError):
        raise
    except Exception as error:
        await ray.get_actor(BOARD).report.remote(f"{who}: {type(error).__name__}: {_cause(error)}")
        raise


def _cause(error: BaseException) -> str:
    """Ray wraps what an actor raised."""
    inner = getattr(error, "cause", None)
    text = f"{type(inner).__name__}: {inner}" if isinstance(inner, BaseException) else str(error)
    return text.strip()[:2000]


class AjetExplorer(Explorer):  # type: ignore[misc]
    """Bounds how far the sampling policy lags behind, and validates each step by the weights that it made."""

    explore_step_num: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._max_staleness = config.algorithm.sample_strategy_args.get("max_staleness")
        if on_cpu():
            from ajet.backbone.ray.cpu.trinity_rollout import CpuAllocator

            self.model_allocator = CpuAllocator(config.explorer)

    async def explore_step(self) -> bool:
        async with _told("explorer"):
            await self._let_trainer_catch_up()
            return bool(await super().explore_step())

    async def finish_current_steps(self) -> None:
        """Where a batch fails of which nothing can be trained, and where its credit is computed."""
        async with _told("explorer"):
            await super().finish_current_steps()

    async def sync_weight(self) -> None:
        async with _told("explorer"):
            await self._take_weights()

    def need_eval(self) -> bool:
        """Never where Trinity asks: the update of the step has not reached the sampler yet. See `_take_weights`."""
        return False

    async def _take_weights(self) -> None:
        """Newer weights, and a validation of them where one is due. It bears their number."""
        before = self.model_version
        await super().sync_weight()
        if validation_is_due(before, self.model_version, self.config.explorer.eval_interval):
            explored = self.explore_step_num
            self.explore_step_num = self.model_version  # Trinity names a validation by it
            try:
                await self.eval()
                await self._finish_eval_step(step=self.model_version)
            finally:
                self.explore_step_num = explored

    async def eval(self) -> None:
        async with _told("explorer"):
            await super().eval()

    async def _let_trainer_catch_up(self) -> None:
        """The next batch is trained by weights of version `explore_step_num`: it waits until the sampler's are at most
        `max_staleness` older. Batches under way are finished first, for the trainer needs them."""
        if self._max_staleness is None or self.config.mode != "both":
            return
        while self.model_version < self.explore_step_num - int(self._max_staleness):
            if self.sync_style == SyncStyle.FULLY_ASYNC and self._inflight_train_steps:
                step = self._inflight_train_steps.popleft()
                await self._finish_explore_step(step=step)
                self.last_monitored_step = step
            elif self.sync_style != SyncStyle.FULLY_ASYNC:
                await self.finish_current_steps()
                await self._take_weights()
            await asyncio.sleep(LOOK_S)

    async def _finish_eval_step(self, step: int | None = None, prefix: str = "eval") -> None:
        pending = list(self.pending_eval_tasks)
        await super()._finish_eval_step(step, prefix)
        left = set(self.pending_eval_tasks)
        for task in pending:
            if task not in left:
                number, name = task
                await ray.get_actor(BOARD).settle_validation.remote(number, f"{number}/{name}/")


class AjetTrainer(Trainer):  # type: ignore[misc]
    """Reports staleness, and sizes the train engine's mini-batch by what a batch turned out to hold."""

    def __init__(self, config: Config) -> None:
        if on_cpu():
            from ajet.backbone.ray.cpu.trinity_trainer import CpuTrainEngine

            # Trinity chooses among its own engines; this process is this trainer's alone
            trainer_module.get_trainer_wrapper = CpuTrainEngine
        super().__init__(config)

    def steps_done(self) -> int:
        """How far it came."""
        return int(self.train_step_num)

    async def train_step(self, exps: list[Experience]) -> dict[str, Any]:
        async with _told("trainer"):
            noted = staleness(exps, self.train_step_num)
            self._set_mini_batch(len(exps))
            began = time.time()
            metrics: dict[str, Any] = await super().train_step(exps)
            return metrics | noted | {"time/train_began": began, "time/train_ended": time.time()}

    async def _sample_data(self) -> Any:
        async with _told("trainer"):
            return await super()._sample_data()

    async def sync_weight(self) -> dict[str, Any]:
        async with _told("trainer"):
            metrics: dict[str, Any] = await super().sync_weight()
            return metrics

    async def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> dict[str, Any]:
        async with _told("trainer"):
            metrics: dict[str, Any] = await super().save_checkpoint(block_until_saved, save_as_hf)
            return metrics

    def _set_mini_batch(self, rows: int) -> None:
        """Trinity's verl engine cuts a batch into mini-batches of a fixed size; a step is to be `mini_batch_num`."""
        engine_config = getattr(self.engine, "config", None)
        if engine_config is None or not hasattr(engine_config, "actor"):
            return
        arguments = self.config.algorithm.sample_strategy_args
        engine_config.actor.ppo_mini_batch_size = rows // int(arguments["updates"])


def validation_is_due(before: int, version: int, every: int) -> bool:
    """Whether a multiple of `every` came with these weights. The first weights of a run (before: -1) are those of its
    start or of a checkpoint: a validation of them is not this one's business."""
    return before >= 0 and version // every > before // every


def staleness(exps: list[Experience], version: int) -> dict[str, float]:
    """By how many steps the weights that are trained are newer than those that sampled, over trained tokens."""
    counts: dict[int, int] = {}
    for exp in exps:
        for drawn, count in exp.info[VERSIONS]:
            counts[version - drawn] = counts.get(version - drawn, 0) + count
    tokens = sum(counts.values())
    if not tokens:
        return {}
    return {
        "train/staleness": sum(lag * count for lag, count in counts.items()) / tokens,
        "train/staleness/max": float(max(counts)),
        **{f"train/staleness/tokens@{lag}": float(count) for lag, count in sorted(counts.items())},
    }
