"""`EpisodeWorker`: a Ray actor that runs our pool on verl's prompts; `EpisodeManager` hands them out.

Each worker has a runtime of its own and its share of `rollout.max_env_worker`. Nothing here decides what is trained:
groups, retries and failures are the pool's, credit is the trainer process's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import ray
import transfer_queue as tq
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from ajet.backbone.plan import validation_repeats
from ajet.backbone.ray.collector import COLLECTOR, HEAD, EpisodeCollector, GroupRunner
from ajet.backbone.ray.credit import PLACE
from ajet.backbone.ray.engine import ServerEngine
from ajet.backbone.ray.facts import RunPayload
from ajet.backbone.ray.rows import Row, group_rows, stand_in, validation_row
from ajet.backbone.ray.verl import plugin
from ajet.backbone.ray.watcher import first_line
from ajet.backbone.training_settings import credit_settings, imitate_from
from ajet.schema.episode import EpisodeGroup
from ajet.schema.errors import LostThreadsError, UserError
from ajet.schema.task import Task
from ajet.trainer.credit import EpisodeCredit

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Built by verl's manager; `llm_client` is verl's way to its rollout servers."""

    def __init__(self, config: Any, llm_client: Any, teacher_client: Any = None, reward_workers: Any = None) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._client = llm_client
        self._servers = str(rollout.name)
        self._runner = GroupRunner(RunPayload.of(config), self._make_engine, workers=int(rollout.agent.num_workers))
        self._threshold = self._runner.config.ajet.task_judge.success_threshold
        self._groups: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._reason = ""
        tq.init()

    async def watch(self) -> str:
        """Return when this worker can't go on, with the reason. A dead worker makes Ray raise instead."""
        self._loop = asyncio.get_running_loop()
        await self._ended.wait()
        return self._reason

    async def generate_sequences(self, batch: Any) -> None:
        validation = bool(batch["validate"]) if "validate" in batch else False
        step = int(batch["global_steps"])
        for index in range(len(batch)):
            uid = str(_at(batch, "uid", index))
            task = Task.model_validate_json(_at(batch, "ajet_task", index))
            occurrence = int(_at(batch, "ajet_occurrence", index))
            place = int(_at(batch, "index", index))
            group = asyncio.create_task(
                self._guarded(uid, task, self._group(uid, task, index, place, step, occurrence, validation))
            )
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)

    async def _guarded(self, uid: str, task: Task, group: Coroutine[Any, Any, None]) -> None:
        try:
            await group
        except Exception as error:  # the trainer waits for this group, and must learn of any failure
            if not isinstance(error, UserError | LostThreadsError):
                log.exception("group %s of task %s failed", uid, task.task_id)
            try:
                await self._runner.report(error)
            finally:
                self._give_up(f"{type(error).__name__}: {error}")

    async def _group(
        self, uid: str, task: Task, index: int, place: int, step: int, occurrence: int, validation: bool
    ) -> None:
        partition = "val" if validation else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        group = await self._runner.run_group(
            task,
            group_id=uid,
            batch_index=index,
            step=step,
            occurrence=occurrence,
            validation=validation,
            num_repeat=validation_repeats(self._runner.config) if validation else None,
        )
        rows = self._validation_rows(group, step) if validation else self._rows(group, step)
        for row in rows:
            row.tag[PLACE] = place
        await _put(rows, partition)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "finished"})

    def _rows(self, group: EpisodeGroup, step: int) -> list[Row]:
        """Lay a group out, even one to be left out: verl would put another in its place, endlessly if each fails."""
        if not group.complete:
            return [stand_in(group.group_id, step=step)]
        samples = [self._runner.samples(episode) for episode in group.episodes]
        return group_rows(group, samples, step=step, threshold=self._threshold)

    def _validation_rows(self, group: EpisodeGroup, step: int) -> list[Row]:
        rows = []
        for episode in [*group.episodes, *group.failed]:
            samples = self._runner.samples(episode) if episode.usable else []
            rows.append(validation_row(episode, samples, uid=group.group_id, step=step, threshold=self._threshold))
        return rows

    def _make_engine(self, config: Config) -> ServerEngine:
        return ServerEngine.of(config, self._client, self._servers, self._server_died)

    def _server_died(self, error: BaseException) -> None:
        """Called on the service loop."""
        self._loop.call_soon_threadsafe(self._give_up, f"a rollout server died: {first_line(error)}")

    def _give_up(self, reason: str) -> None:
        """The first reason counts."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()


def _at(batch: Any, key: str, index: int) -> Any:
    """An element of a batch's non-tensor column."""
    value = batch[key][index]
    return getattr(value, "data", value)


async def _put(rows: list[Row], partition: str) -> None:
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    await tq.async_kv_batch_put(
        keys=[row.key for row in rows],
        fields=list_of_dict_to_tensordict([row.fields for row in rows]),
        tags=[row.tag for row in rows],
        partition_id=partition,
    )


_current: EpisodeManager | None = None


def current_manager() -> EpisodeManager:
    """The manager of the run that this process drives."""
    if _current is None:
        raise RuntimeError("verl's trainer has no ajet manager: agent_loop_manager_class was overridden")
    return _current


class EpisodeManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Named by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _current
        super().__init__(*args, **kwargs)
        plugin.require_entry_point()
        run = RunPayload.of(self.config)
        # remote runners connect to one worker, on the node that the user knows
        self.agent_loop_workers_class = ray.remote(resources=HEAD if run.remote_runners else {})(EpisodeWorker)
        self._collector = (
            ray.remote(EpisodeCollector).options(name=COLLECTOR, num_cpus=0, resources=HEAD).remote(run.encode())
        )
        self._watched: dict[Any, str] = {}
        self._begin_again()
        config = run.load_config()
        common = config.ajet.trainer_common
        self.credit_settings = credit_settings(config)
        self.imitate_from = imitate_from(config)
        self.updates = common.mini_batch_num
        self.seed = common.seed
        self.group_size = int(self.config.actor_rollout_ref.rollout.n)
        trainer, actor = self.config.trainer, self.config.actor_rollout_ref.actor
        self.data_parallel = int(trainer.nnodes * trainer.n_gpus_per_node // actor.ulysses_sequence_parallel_size)
        _current = self

    def _begin_again(self) -> None:
        """Run groups again that had ended but weren't trained when an asynchronous run stopped, as verl does with those
        that were running. Their rows are in the checkpoint, but their episodes were never recorded."""
        kept = (tq.kv_list("train") or {}).get("train", {})
        ended = {uid: tag for uid, tag in kept.items() if tag.get("is_prompt") and tag["status"] == "finished"}
        if ended:
            tags = [tag | {"status": "pending"} for tag in ended.values()]
            tq.kv_batch_put(keys=list(ended), partition_id="train", tags=tags)

    def generate_sequences(self, prompts: Any) -> None:
        """Start a group for each prompt, without waiting for any."""
        self.check_alive()
        super().generate_sequences(prompts)

    def check_alive(self) -> None:
        """Raise, by name, if a worker or the collector is gone or can't go on."""
        if not self._watched:
            for index, worker in enumerate(self.agent_loop_workers):
                self._watched[worker.watch.remote()] = f"episode worker {index}"
            self._watched[self._collector.watch.remote()] = "the episode collector"
        ended, _ = ray.wait(list(self._watched), num_returns=1, timeout=0)
        for reference in ended:
            try:
                reason = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"{self._watched[reference]} died: {first_line(error)}") from error
            raise RuntimeError(f"{self._watched[reference]} can't go on: {reason}")

    def end_step(
        self, step: int, groups: Sequence[str], credit: Sequence[EpisodeCredit], *, validation: bool
    ) -> dict[str, float]:
        """Record these groups' episodes with their credit; the metrics of the step."""
        ended = self._collector.end_step.remote(step, list(groups), list(credit), validation)
        metrics: dict[str, float] = ray.get(ended)
        reason = ray.get(self._collector.failure.remote())
        if reason is not None:
            raise RuntimeError(reason)
        return metrics

    def close(self) -> None:
        ray.get(self._collector.close.remote())

    def set_mini_batch(self, size: int) -> None:
        """verl's trainer reads this at each step; the object is the trainer's own."""
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = size


@ray.remote
class TrainerProcess(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc]
    """verl's trainer. With its process, those that it started end, too."""

    def run(self, config: Any) -> None:
        super().run(config)
        current_manager().close()
