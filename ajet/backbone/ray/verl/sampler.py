"""`EpisodeSampler`: verl's replay buffer, with our credit, in the process of verl's trainer.

When the groups of a step are complete, the credit of all their episodes is computed at once and written where verl
looks for rewards; groups that teach nothing leave the batch; and verl's mini-batch is sized by what the batch turned
out to hold, so that a step is one update (or `mini_batch_num`), however many rows there are.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from ajet.backbone.ray.credit import GROUP, BatchCredit, credit_batch, mini_batch
from ajet.backbone.ray.verl.manager import current_manager
from ajet.backbone.ray.verl.rows import nested

NOTHING_USABLE = "no materializable trajectories"
"""What verl says when every group of a step failed."""
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

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        self._added = {}
        self._step = global_steps
        try:
            batch, metrics = super().sample(  # type: ignore[misc]
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
        except RuntimeError as error:
            reason = self._first_failure(partition_id)
            if NOTHING_USABLE not in str(error) or reason is None:
                raise
            raise RuntimeError(
                f"step {global_steps}: no group has enough usable episodes; the first failed: {reason}"
            ) from error
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
        credit = credit_batch(batch.keys, batch.tags, manager.credit_settings, imitate_from=manager.imitate_from)
        metrics = manager.end_step(self._step, selected_prompt_uids, credit.episodes, validation=False)
        batch = _with_credit(batch, credit, manager.updates)
        rows = len(batch.keys)
        manager.set_mini_batch(
            mini_batch(
                rows, group_size=manager.group_size, updates=manager.updates, data_parallel=manager.data_parallel
            )
        )
        self._added = metrics | credit.metrics | {"train/rows": float(rows)}
        return batch

    def _first_failure(self, partition_id: str) -> str | None:
        return next((tag["failure"] for tag in _group_tags(partition_id) if tag["failure"]), None)


class EpisodeSampler(_CreditedSampling, ReplayBuffer):  # type: ignore[misc]
    """For synchronous training."""


class AsyncEpisodeSampler(_CreditedSampling, ReplayBufferAsync):  # type: ignore[misc]
    """For training that overlaps with rollout."""


def _group_tags(partition_id: str) -> list[dict[str, Any]]:
    import transfer_queue as tq

    prompts = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    return [tag[GROUP] for tag in prompts.values() if GROUP in tag]


def _with_credit(batch: Any, credit: BatchCredit, updates: int) -> Any:
    """Write the credit of the trained rows, and drop the others."""
    import transfer_queue as tq

    kept = [index for index, trained in enumerate(credit.trained) if trained]
    dropped = [key for key, trained in zip(batch.keys, credit.trained, strict=True) if not trained]
    if dropped:
        tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    keys = [batch.keys[index] for index in kept]
    # each of several updates gets a share of the rows, and must be as large as an update of all of them
    scores = nested([credit.dense[index] * updates for index in kept])
    tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict({"rm_scores": scores}, batch_size=len(keys))
    )
    return type(batch)(
        partition_id=batch.partition_id, keys=keys, tags=[batch.tags[index] for index in kept], extra_info={}
    )
