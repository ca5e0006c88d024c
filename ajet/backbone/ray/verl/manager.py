"""`EpisodeManager`: verl's agent-loop manager that runs our episodes, in the process of verl's trainer.

verl pushes prompts to it and goes on. Its workers (one actor each, spread over the nodes) run our pool on them and put
rows into verl's queue. verl builds the sampler apart from it: `current_manager` is where the sampler finds the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from ajet.backbone.ray.collector import COLLECTOR, HEAD, EpisodeCollector
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.verl import plugin
from ajet.backbone.ray.verl.worker import EpisodeWorker
from ajet.backbone.ray.watcher import first_line
from ajet.backbone.training_settings import credit_settings
from ajet.trainer.credit import EpisodeCredit

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
        # runners elsewhere connect to one worker, on the node that the user knows
        self.agent_loop_workers_class = ray.remote(resources=HEAD if run.remote_runners else {})(EpisodeWorker)
        self._collector = (
            ray.remote(EpisodeCollector).options(name=COLLECTOR, num_cpus=0, resources=HEAD).remote(run.encode())
        )
        self._watched: dict[Any, str] = {}
        config = run.load_config()
        common = config.ajet.trainer_common
        self.credit_settings = credit_settings(config)
        self.imitate_from = common.algorithm.sft.min_reward if common.algorithm.policy_loss == "sft" else None
        self.updates = common.mini_batch_num
        self.seed = common.seed
        self.group_size = int(self.config.actor_rollout_ref.rollout.n)
        trainer, actor = self.config.trainer, self.config.actor_rollout_ref.actor
        self.data_parallel = int(trainer.nnodes * trainer.n_gpus_per_node // actor.ulysses_sequence_parallel_size)
        _current = self

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

    def set_mini_batch(self, size: int) -> None:
        """verl's trainer reads this at each step; the object is the trainer's own."""
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = size
