"""`EpisodeManager`: verl's agent-loop manager that runs our episodes. Lives in verl's driver process.

verl pushes prompts to it and goes on; its workers (one an actor, spread over the nodes) run our pool on them and put
rows into verl's queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from ajet.backbone.ray.collector import BOARD, EpisodeBoard
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.verl import driver_state, plugin
from ajet.backbone.ray.verl.worker import EpisodeWorker
from ajet.credit import EpisodeCredit

HEAD = {"node:__internal_head__": 0.001}
"""Ray's own mark of the head node: the experiment folder is there."""


class EpisodeManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Named by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin.require_entry_point()
        self.agent_loop_workers_class = ray.remote(EpisodeWorker)
        run = RunPayload.of(self.config)
        self._board = ray.remote(EpisodeBoard).options(name=BOARD, num_cpus=0, resources=HEAD).remote(run.encode())
        self._watched: dict[Any, str] = {}
        driver_state.enter(driver_state.DriverState(self.config, self))

    def generate_sequences(self, prompts: Any) -> None:
        """Start a group for each prompt, without waiting for any."""
        self.check_alive()
        super().generate_sequences(prompts)

    def check_alive(self) -> None:
        """Raise, by name, if a worker or the board is gone or can't go on."""
        if not self._watched:
            for index, worker in enumerate(self.agent_loop_workers):
                self._watched[worker.watch.remote()] = f"episode worker {index}"
            self._watched[self._board.watch.remote()] = "the episode recorder"
        ended, _ = ray.wait(list(self._watched), num_returns=1, timeout=0)
        for reference in ended:
            try:
                reason = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"{self._watched[reference]} died: {str(error).strip().splitlines()[0]}") from error
            raise RuntimeError(f"{self._watched[reference]} can't go on: {reason}")

    def settle(
        self, step: int, groups: Sequence[str], credit: Sequence[EpisodeCredit], *, validation: bool
    ) -> dict[str, float]:
        """Record these groups' episodes with their credit; the metrics of the step."""
        metrics: dict[str, float] = ray.get(self._board.settle.remote(step, list(groups), list(credit), validation))
        return metrics
