"""What verl's driver process knows of the run: verl builds manager and sampler apart, and they meet here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.settings import credit_settings
from ajet.credit import EpisodeCredit

_current: DriverState | None = None


class DriverState:
    """One run's state in the driver. Set by the manager, used by the sampler."""

    def __init__(self, verl_config: Any, manager: Any) -> None:
        self._verl = verl_config
        self._manager = manager
        self.run = RunPayload.of(verl_config)
        self.config = self.run.load_config()
        common = self.config.ajet.trainer_common
        self.credit_settings = credit_settings(self.config)
        algorithm = common.algorithm
        self.imitate_from = algorithm.sft.min_reward if algorithm.policy_loss == "sft" else None
        self.updates = common.mini_batch_num
        trainer = verl_config.trainer
        sequence_parallel = verl_config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        self.group_size = int(verl_config.actor_rollout_ref.rollout.n)
        self.data_parallel = int(trainer.nnodes * trainer.n_gpus_per_node // sequence_parallel)

    def set_mini_batch(self, size: int) -> None:
        """verl's trainer reads this at each step; the object is the trainer's own."""
        self._verl.actor_rollout_ref.actor.ppo_mini_batch_size = size

    def check_alive(self) -> None:
        """Raise if a process that runs episodes is gone."""
        self._manager.check_alive()

    def settle(
        self, step: int, groups: Sequence[str], credit: Sequence[EpisodeCredit], *, validation: bool
    ) -> dict[str, float]:
        """Record the episodes of these groups; their metrics."""
        metrics: dict[str, float] = self._manager.settle(step, groups, credit, validation=validation)
        return metrics


def enter(state: DriverState) -> None:
    """This process is the driver of that run."""
    global _current
    _current = state


def current() -> DriverState:
    """The run this process drives."""
    if _current is None:
        raise RuntimeError("verl's driver has no ajet manager: agent_loop_manager_class was overridden")
    return _current
