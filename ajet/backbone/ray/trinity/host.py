"""Trinity's parts as ours: `GroupWorkflow` runs a whole group of our episodes as one of its workflows, and
`TrinityTaskReader` feeds it; the explorer and trainer, `FileMonitor`, and `EpisodeHost`, which serves external runners.

Trinity lets a workflow repeat its task by itself, so one call is one group: retries, refilling and dynamic rollout are
our pool's, as with every backbone. It runs its workflows in several processes; runners connect to one address. So each
of those processes hands its groups to the host, on the head node, and gets them back when they have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
import trinity.trainer.trainer as trainer_module
from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import Config as TrinityConfig
from trinity.common.config import StorageConfig
from trinity.common.constants import TRAINER_NAME, SyncStyle
from trinity.common.experience import Experience
from trinity.common.workflows.workflow import Task as TrinityTask
from trinity.common.workflows.workflow import Workflow
from trinity.explorer.explorer import Explorer
from trinity.trainer.trainer import Trainer
from trinity.utils.monitor import Monitor

from ajet.backbone.ray.collector import COLLECTOR, GroupRunner
from ajet.backbone.ray.engine import TrinityEngine
from ajet.backbone.ray.facts import RunError, RunPayload, training_stream
from ajet.backbone.ray.rows import UPDATES, VERSIONS, empty_experience, group_experiences
from ajet.backbone.ray.start import on_cpu
from ajet.backbone.ray.watcher import first_line
from ajet.schema.episode import EpisodeGroup
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_validation_tasks

if TYPE_CHECKING:
    from ajet.config import Config


HOST = "ajet_episode_host"


class ServedModel(NamedTuple):
    """The parts of Trinity's `ModelWrapper` that another process needs to use the same model."""

    model: Any
    api_address: str | None
    api_key: str
    model_path: str | None

    @classmethod
    def of(cls, wrapper: Any) -> ServedModel:
        return cls(wrapper.model, wrapper.api_address, wrapper.api_key, wrapper.model_path)


def group_runner(run: RunPayload, model: Any, processes: int = 1) -> GroupRunner:
    """Create the runner of groups for one of Trinity's models, in this process, which is one of so many. `model`: a
    `ModelWrapper` or a `ServedModel`."""

    def make_engine(config: Config) -> TrinityEngine:
        return TrinityEngine(
            model, max_model_len=config.ajet.rollout.max_model_len, embedded=on_cpu(), on_death=server_died
        )

    def server_died(error: BaseException) -> None:
        runner.collector.report_failure.remote(RunError(f"a rollout model died: {first_line(error)}", users=False))

    runner = GroupRunner(run, make_engine, workers=processes)
    return runner


class EpisodeHost:
    """Opens with the first group."""

    def __init__(self, payload: str) -> None:
        self._run = RunPayload.decode(payload)
        self._runner: GroupRunner | None = None

    async def watch(self) -> None:
        """Never returns: Ray raises in the caller if this process dies."""
        await asyncio.Event().wait()

    async def open(self, model: ServedModel) -> None:
        """Serve episodes to runners. Raises a UserError."""
        if self._runner is None:
            self._runner = group_runner(self._run, model)
        await self._runner.open()

    async def run_group(self, model: ServedModel, task: Task, options: dict[str, Any]) -> EpisodeGroup:
        await self.open(model)
        assert self._runner is not None
        return await self._runner.run_group(task, **options)


class HostedGroups(GroupRunner):
    """Hands its groups to the host."""

    def __init__(self, run: RunPayload, model: Any) -> None:
        super().__init__(run, _no_engine)
        self._model = ServedModel.of(model)
        self._host = ray.get_actor(HOST)

    async def open(self) -> None:
        await self._host.open.remote(self._model)

    async def run_group(self, task: Task, **options: Any) -> EpisodeGroup:
        group: EpisodeGroup = await self._host.run_group.remote(self._model, task, options)
        return group


def _no_engine(config: Config) -> TrinityEngine:
    raise AssertionError("groups run in the host's process")


_runners: dict[str, GroupRunner] = {}
"""By the run's payload. Trinity builds a workflow per task; what they need opens once per process."""


def _runner_of(payload: str, model: Any, processes: int) -> GroupRunner:
    if payload not in _runners:
        run = RunPayload.decode(payload)
        _runners[payload] = HostedGroups(run, model) if run.remote_runners else group_runner(run, model, processes)
    return _runners[payload]


class GroupWorkflow(Workflow):  # type: ignore[misc]
    """Built by Trinity for each task."""

    can_repeat = True
    is_async = True

    def __init__(self, *, task: TrinityTask, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats = 1
        given = task.workflow_args
        self._runner = _runner_of(given["payload"], model, given["processes"])

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self._repeats = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the group. A failure is reported, and ends the run: Trinity would go on without the group, or wait for an
        hour if it has none."""
        try:
            return await self._run()
        except Exception as error:
            await self._runner.report(error)
            raise

    async def _run(self) -> list[Experience]:
        task = Task.model_validate_json(self.task.raw_task["task"])
        validation = bool(self.task.is_eval)
        uid = group_name(self.task.batch_id, self.task.task_id)
        await self._runner.open()  # that is not part of the rollout's time
        begin = time.time()
        group = await self._runner.run_group(
            task,
            group_id=uid,
            batch_index=int(self.task.task_id),
            step=step_of(self.task.batch_id),
            occurrence=self.task.raw_task["occurrence"],
            validation=validation,
            num_repeat=self._repeats,
        )
        span = (begin, time.time())
        if validation or not group.complete:
            return [empty_experience(group, uid=uid, span=span)]
        return group_experiences(group, [self._runner.samples(one) for one in group.episodes], uid=uid, span=span)


def group_name(batch: int | str, task: int | str) -> str:
    """The group's name: step, and place in its batch."""
    return f"{batch}/{task}"


def step_of(batch: int | str) -> int:
    """The step that a batch belongs to; a validation's is `STEP/NAME`."""
    return int(str(batch).partition("/")[0])


class TrinityTaskReader(BufferReader):  # type: ignore[misc]
    """Built by Trinity's explorer: once for training, and for each validation."""

    def __init__(self, config: StorageConfig) -> None:
        run = RunPayload.decode(config.workflow_args["payload"])
        run.enter()
        loaded = run.load_config()
        self._config = config
        self._position = config.index
        if config.is_eval:
            tasks = read_validation_tasks(build_reader(loaded))
            self._task_at: Callable[[int], Task] = tasks.__getitem__
            self._occurrence: Callable[[int], int] = lambda index: 0
            self._end = len(tasks)
        else:
            stream = training_stream(loaded)
            self._task_at, self._occurrence = stream.task_at, stream.occurrence_at
            self._end = run.total_steps * loaded.ajet.data.train_batch_size

    async def read(self, batch_size: int | None = None, **_: Any) -> list[TrinityTask]:
        if self._position >= self._end:
            raise StopAsyncIteration
        end = min(self._end, self._position + (batch_size or self._config.batch_size))
        tasks = [self._task(index) for index in range(self._position, end)]
        self._position = end
        return tasks

    def __len__(self) -> int:
        return self._end

    def state_dict(self) -> dict[str, Any]:
        return {"current_index": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = int(state_dict["current_index"])

    def _task(self, index: int) -> TrinityTask:
        return TrinityTask(
            workflow=GroupWorkflow,
            repeat_times=self._config.repeat_times,
            workflow_args=self._config.workflow_args,
            is_eval=self._config.is_eval,
            raw_task={"task": self._task_at(index).model_dump_json(), "occurrence": self._occurrence(index)},
            index={"index": index},
        )


LOOK_S = 0.2
"""Seconds between looks at the policy version while the explorer waits for it."""


@asynccontextmanager
async def _reporting(who: str) -> AsyncIterator[None]:
    """Report exceptions to the collector; running out of tasks or rows isn't one."""
    try:
        yield
    except (StopAsyncIteration, asyncio.CancelledError):
        raise
    except Exception as error:
        reason = RunError(f"{who}: {RunError.of(error).text}", users=False)
        await ray.get_actor(COLLECTOR).report_failure.remote(reason)
        raise


class AjetExplorer(Explorer):  # type: ignore[misc]
    """Bounds how far the sampling policy lags behind, and validates each step with the weights that it made."""

    explore_step_num: int

    def __init__(self, config: TrinityConfig) -> None:
        super().__init__(config)
        self._max_staleness = config.algorithm.sample_strategy_args.get("max_staleness")
        run = RunPayload.decode(config.algorithm.advantage_fn_args["payload"])
        self._cut_off = run.resumed_step if run.lacks_validation else None
        if on_cpu():
            from ajet.backbone.ray.trinity.cpu_trainer import CpuAllocator

            self.model_allocator = CpuAllocator(config.explorer)

    async def explore_step(self) -> bool:
        async with _reporting("explorer"):
            await self._let_trainer_catch_up()
            return bool(await super().explore_step())

    async def finish_current_steps(self) -> None:
        """Computes a batch's credit; fails if nothing in it can be trained."""
        async with _reporting("explorer"):
            await super().finish_current_steps()

    async def sync_weight(self) -> None:
        async with _reporting("explorer"):
            await self._take_weights()

    def need_eval(self) -> bool:
        """Never when Trinity asks: the step's update has not reached the sampler yet. See `_take_weights`."""
        return False

    async def _take_weights(self) -> None:
        before = self.model_version
        await super().sync_weight()
        every, last = self.config.explorer.eval_interval, self.config.buffer.total_steps
        if validation_is_due(before, self.model_version, every, last, self._cut_off):
            explored = self.explore_step_num
            self.explore_step_num = self.model_version  # Trinity names a validation after it
            try:
                await self.eval()
                await self._finish_eval_step(step=self.model_version)
            finally:
                self.explore_step_num = explored

    async def eval(self) -> None:
        async with _reporting("explorer"):
            await super().eval()

    async def _let_trainer_catch_up(self) -> None:
        """The next batch trains weights of version `explore_step_num`: wait until the sampler's are at most
        `max_staleness` older. Batches under way are finished first, because the trainer needs them."""
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
                await ray.get_actor(COLLECTOR).end_validation.remote(number, f"{number}/{name}/")


class AjetTrainer(Trainer):  # type: ignore[misc]
    """Reports staleness, and sizes the train engine's mini-batch by what a batch turned out to hold."""

    def __init__(self, config: TrinityConfig) -> None:
        if on_cpu():
            from ajet.backbone.ray.trinity.cpu_trainer import CpuTrainEngine

            # Trinity chooses among its own engines; this process is this trainer's alone
            trainer_module.get_trainer_wrapper = CpuTrainEngine
        super().__init__(config)

    def steps_done(self) -> int:
        return int(self.train_step_num)

    async def train_step(self, exps: list[Experience]) -> dict[str, Any]:
        async with _reporting("trainer"):
            noted = staleness(exps, self.train_step_num)
            engine: Any = getattr(self.engine, "config", None)
            if hasattr(engine, "actor"):  # Trinity's verl engine cuts a batch into mini-batches of a fixed size
                engine.actor.ppo_mini_batch_size = len(exps) // exps[0].info[UPDATES]
            began = time.time()
            metrics: dict[str, Any] = await super().train_step(exps)
            return metrics | noted | {"time/train_began": began, "time/train_ended": time.time()}

    async def _sample_data(self) -> Any:
        async with _reporting("trainer"):
            return await super()._sample_data()

    async def sync_weight(self) -> dict[str, Any]:
        async with _reporting("trainer"):
            metrics: dict[str, Any] = await super().sync_weight()
            return metrics

    async def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> dict[str, Any]:
        async with _reporting("trainer"):
            metrics: dict[str, Any] = await super().save_checkpoint(block_until_saved, save_as_hf)
            return metrics


def validation_is_due(before: int, version: int, every: int, last: int, cut_off: int | None = None) -> bool:
    """Whether these weights passed a multiple of `every`, or are those of the last step. The first weights of a run
    (before: -1), those of its start or of a checkpoint, are validated elsewhere, unless that was cut off after this
    step."""
    if before < 0:
        return version == cut_off
    return version > before and (version // every > before // every or version == last >= every)


def staleness(exps: list[Experience], version: int) -> dict[str, float]:
    """How many steps the trained weights are ahead of those that sampled, over trained tokens."""
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


class FileMonitor(Monitor):  # type: ignore[misc]
    """One file per role: `explorer.jsonl`, `trainer.jsonl`."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project, name, role, config)
        self._file = Path(config.monitor.monitor_args["folder"]) / f"{role}.jsonl"
        self._role = role
        self._since = time.monotonic()

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """One line. Explorer and trainer write files of their own."""
        numbers = {key: float(value) for key, value in data.items() if isinstance(value, int | float | np.number)}
        if self._role == TRAINER_NAME:  # it logs once per step
            numbers["time/step"], self._since = time.monotonic() - self._since, time.monotonic()
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "data": numbers}) + "\n")

    def close(self) -> None:
        """Nothing is held open."""
