"""`EpisodeWorker`: a Ray actor that runs our pool on the prompts verl sends it, and answers with rows.

Each worker has services of its own (service loop, gateway, tokenizer, user's classes) and its share of
`rollout.max_env_worker`. Nothing here decides what is trained: groups, retries and failures are the pool's, credit is
the driver's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
import transfer_queue as tq

from ajet.backbone.ray.collector import BOARD
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.row_credit import GROUP, group_tag
from ajet.backbone.ray.verl.rows import Row, rows_of, validation_row
from ajet.backbone.ray.verl.services import open_services
from ajet.backbone.validation import validation_repeats
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.runtime.runtime import Runtime
from ajet.schema.episode import EpisodeGroup
from ajet.schema.errors import LostThreadsError, UserError
from ajet.schema.task import Task

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Built by verl's manager; `llm_client` is verl's way to its rollout servers."""

    def __init__(self, config: Any, llm_client: Any, teacher_client: Any = None, reward_workers: Any = None) -> None:
        self._run = RunPayload.of(config)
        self._run.enter()
        self._config = self._run.load_config()
        self._tracker_settings = TrackerSettings.from_config(self._config)
        self._client = llm_client
        self._workers = int(config.actor_rollout_ref.rollout.agent.num_workers)
        self._embedded = config.actor_rollout_ref.rollout.name not in ("vllm", "sglang", "trtllm")
        self._groups: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Task[Runtime] | None = None
        self._ended: asyncio.Future[str] | None = None
        self._board = ray.get_actor(BOARD)
        tq.init()

    async def watch(self) -> str:
        """Return when this worker can't go on, with the reason. A dead worker makes Ray raise instead."""
        self._loop = asyncio.get_running_loop()
        return await self._end()

    async def generate_sequences(self, batch: Any) -> None:
        """Start a group for each prompt of the batch."""
        validation = bool(batch["validate"]) if "validate" in batch else False
        step = int(batch["global_steps"])
        for index in range(len(batch)):
            uid = str(_at(batch, "uid", index))
            task = Task.model_validate_json(_at(batch, "ajet_task", index))
            group = asyncio.create_task(self._guarded(uid, task, index, step, validation))
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)

    async def _guarded(self, uid: str, task: Task, index: int, step: int, validation: bool) -> None:
        try:
            await self._group(uid, task, index, step, validation)
        except (UserError, LostThreadsError) as error:
            self._give_up(f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it is, the driver waits for this group and must hear of it
            log.exception("group %s of task %s failed", uid, task.task_id)
            self._give_up(f"{type(error).__name__}: {error}")

    async def _group(self, uid: str, task: Task, index: int, step: int, validation: bool) -> None:
        partition = "val" if validation else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        services = await self._services()
        running = services.submit(
            services.pool.run_group(
                task,
                group_id=uid,
                batch_index=index,
                step=step,
                validation=validation,
                num_repeat=validation_repeats(self._config) if validation else None,
            )
        )
        group = await asyncio.wrap_future(running)
        await self._board.add.remote(uid, group, task.main_query or "")
        rows = self._validation_rows(group, step) if validation else self._rows(group, step)
        if rows:
            await _put(rows, partition)
        status = "finished" if rows else "failure"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status, GROUP: group_tag(group)})

    def _rows(self, group: EpisodeGroup, step: int) -> list[Row]:
        if not group.complete:
            return []
        rows = []
        for episode in group.episodes:
            samples, _ = episode_samples(episode, self._tracker_settings)
            rows += rows_of(episode, samples, uid=group.group_id, step=step)
        return rows

    def _validation_rows(self, group: EpisodeGroup, step: int) -> list[Row]:
        rows = []
        for episode in [*group.episodes, *group.failed]:
            samples = episode_samples(episode, self._tracker_settings)[0] if episode.usable else []
            rows.append(validation_row(episode, samples, uid=group.group_id, step=step))
        return rows

    async def _services(self) -> Runtime:
        if self._opening is None:
            self._opening = asyncio.create_task(
                asyncio.to_thread(
                    open_services,
                    self._config,
                    self._client,
                    parallel=max(1, self._config.ajet.rollout.max_env_worker // self._workers),
                    embedded=self._embedded,
                    on_death=self._server_died,
                )
            )
        return await asyncio.shield(self._opening)

    def _server_died(self, error: BaseException) -> None:
        """Called on the service loop."""
        self._loop.call_soon_threadsafe(self._give_up, f"a rollout server died: {_first_line(error)}")

    def _end(self) -> asyncio.Future[str]:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def _give_up(self, reason: str) -> None:
        if not self._end().done():
            self._end().set_result(reason)


def _at(batch: Any, key: str, index: int) -> Any:
    """An element of a batch's non-tensor column."""
    value = batch[key][index]
    return getattr(value, "data", value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


async def _put(rows: list[Row], partition: str) -> None:
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    await tq.async_kv_batch_put(
        keys=[row.key for row in rows],
        fields=list_of_dict_to_tensordict([row.fields for row in rows]),
        tags=[row.tag for row in rows],
        partition_id=partition,
    )
