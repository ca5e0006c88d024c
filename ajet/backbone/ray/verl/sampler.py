"""`EpisodeSampler`: verl's replay buffer with our credit, and `TaskDataset`, the tasks in verl's form.

When the groups of a step are complete, the credit of all their episodes is computed at once: advantages are written
where verl looks for rewards, weights beside them. Groups that teach nothing leave the batch. What is left is laid out,
and verl's mini-batch sized, so that a step is one update (or `mini_batch_num`), however many rows there are.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch.utils.data import Dataset
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from ajet.backbone.ray.credit import PLACE, BatchCredit, BatchRow, RowLayout, credit_batch, in_order, lay_out
from ajet.backbone.ray.facts import KEY, RunPayload, training_stream
from ajet.backbone.ray.rows import WEIGHTS, blank_row, nested
from ajet.backbone.ray.verl.worker import EpisodeManager, current_manager
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_validation_tasks

POLL_S = 0.25
"""Seconds between looks at the queue. verl's own 2 s would be most of a small step."""


class _CreditedSampling:
    """What is added to both of verl's replay buffers."""

    poll_interval: float
    _added: dict[str, float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.poll_interval = POLL_S
        self._added = {}
        self._step = 0
        self._replaced: list[str] = []
        """Groups that verl has put others in place of: they count in the figures of the step that waited."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        self._added = {}
        self._step = global_steps
        batch, metrics = super().sample(  # type: ignore[misc]
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        return batch, {**metrics, **self._added}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        current_manager().check_alive()
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))  # type: ignore[misc]

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)  # type: ignore[misc]
        manager = current_manager()
        if partition_id == "val":
            manager.end_step(self._step, selected_prompt_uids, [], validation=True)
            return batch
        batch.reorder(in_order(batch.keys, [tag[PLACE] for tag in batch.tags]))
        credit = credit_batch(batch.keys, batch.tags, manager.credit_settings, imitate_from=manager.imitate_from)
        groups = [*selected_prompt_uids, *self._replaced]
        self._replaced = []
        metrics = manager.end_step(self._step, groups, credit.episodes, validation=False)
        batch, layout = _with_credit(batch, credit, manager, self._step)
        manager.set_mini_batch(layout.size // manager.group_size)
        self._added = metrics | credit.metrics | {"train/rows": float(sum(credit.trained))}
        return batch

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        self._replaced += uids
        super()._clear_groups(partition_id, uids)  # type: ignore[misc]


class EpisodeSampler(_CreditedSampling, ReplayBuffer):  # type: ignore[misc]
    """For synchronous training."""


class AsyncEpisodeSampler(_CreditedSampling, ReplayBufferAsync):  # type: ignore[misc]
    """For training that overlaps with rollout."""


class PlacedRows(KVBatchMeta):  # type: ignore[misc]
    """Rows that are where they belong: verl would sort them by length, across updates."""

    def reorder(self, indexes: list[int]) -> None:
        """Leave them."""


def _with_credit(batch: Any, credit: BatchCredit, manager: EpisodeManager, step: int) -> tuple[Any, RowLayout]:
    """Write the credit of the trained rows, drop the others, and put each into its update."""
    import transfer_queue as tq

    kept = [index for index, trained in enumerate(credit.trained) if trained]
    dropped = [key for key, trained in zip(batch.keys, credit.trained, strict=True) if not trained]
    if dropped:
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    keys, tags = [batch.keys[index] for index in kept], [batch.tags[index] for index in kept]
    layout = lay_out(
        [
            BatchRow(key.rsplit("_", 1)[0], tag["seq_len"], int(np.count_nonzero(credit.weights[index])))
            for index, key, tag in zip(kept, keys, tags, strict=True)
        ],
        norm=manager.credit_settings.loss_norm,
        updates=manager.updates,
        ranks=manager.data_parallel,
        multiple=manager.group_size,
        seed=(manager.seed, (step - 1) * manager.updates),
    )
    fields = {
        "rm_scores": nested([credit.advantages[index] for index in kept]),
        WEIGHTS: nested([credit.weights[index] * scale for index, scale in zip(kept, layout.scales, strict=True)]),
    }
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(keys)))
    return _placed(layout.order, keys, tags, batch.partition_id, step), layout


def _placed(
    order: Sequence[int | None], keys: Sequence[str], tags: Sequence[dict[str, Any]], partition_id: str, step: int
) -> PlacedRows:
    """The rows in this order, with new rows that train nothing in between."""
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    blanks = [blank_row(f"blank{uuid.uuid4().hex}", step=step) for index in order if index is None]
    for row in blanks:
        row.tag["is_padding"] = True  # verl leaves it out of its metrics, but can't do without any row
    if blanks:
        tq.kv_batch_put(
            keys=[row.key for row in blanks],
            partition_id=partition_id,
            fields=list_of_dict_to_tensordict([row.fields for row in blanks]),
            tags=[row.tag for row in blanks],
        )
    filling = ((row.key, row.tag) for row in blanks)
    placed = [next(filling) if index is None else (keys[index], tags[index]) for index in order]
    return PlacedRows(
        partition_id=partition_id,
        keys=[key for key, _ in placed],
        tags=[tag for _, tag in placed],
        extra_info={},
    )


SPARE = 4
"""Times more items than the steps need: replaced groups take some, and the end must never be reached."""


class TaskDataset(Dataset[dict[str, Any]]):
    """Built by verl, once for training and once for validation (`data_files`)."""

    def __init__(self, data_files: str, tokenizer: Any, processor: Any, config: Any, max_samples: int = -1) -> None:
        run = RunPayload.decode(config[KEY])
        run.enter()
        loaded = run.load_config()
        self._training = data_files == "training"
        if self._training:
            self._stream = training_stream(loaded)
            self._length = run.total_steps * loaded.ajet.data.train_batch_size * SPARE
        else:
            # without validation tasks nothing is validated, but verl's loader must hold something
            self._tasks = read_validation_tasks(build_reader(loaded)) or training_stream(loaded).tasks[:1]
            self._length = len(self._tasks)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self._training:
            return item_of(self._tasks[index], index)
        return item_of(self._stream.task_at(index), index, self._stream.occurrence_at(index))


def item_of(task: Task, index: int, occurrence: int = 0) -> dict[str, Any]:
    """A task as verl carries it; all but ours (`ajet_…`) is for verl's own bookkeeping.

    `occurrence` tells apart the groups of one task in a step.
    """
    return {
        "ajet_task": task.model_dump_json(),
        "ajet_occurrence": occurrence,
        "index": index,
        "raw_prompt": task.init_messages or [{"role": "user", "content": task.main_query or ""}],
        "data_source": "ajet",
        "reward_model": {"ground_truth": None},
    }
