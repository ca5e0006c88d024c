"""The process that runs verl: `python -m ajet.backbone.ray.verl.driver run.json`. Started and watched by the launcher.

Everything it starts dies with it: Ray's daemons by the kernel's parent-death signal, their workers with them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ajet.backbone.ray.driver import die_with_parent
from ajet.backbone.ray.ray_start import JOIN_DEADLINE_S

RAY_STARTS = 3
SLOW_START = "node timed out during startup"


def main(path: str) -> None:
    """Run verl with the configuration that the launcher wrote."""
    die_with_parent()
    order = json.loads(Path(path).read_text(encoding="utf-8"))

    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    from ajet.backbone.ray.verl import plugin
    from ajet.backbone.ray.verl.compose import compose_verl_config

    plugin.require_entry_point()
    config = compose_verl_config(order["settings"], given=order["given"])
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)
    if order.get("nodes"):
        _await_nodes(config.ray_kwargs.ray_init.address, int(order["nodes"]))
    _insist(lambda: run_ppo(config, task_runner_class=TaskRunnerV1))


def _insist(start: Callable[[], None]) -> None:
    """Start again if Ray's daemons were too slow: it gives them 30 s, which a machine under load can exceed."""
    import ray

    for left in reversed(range(RAY_STARTS)):
        try:
            return start()
        except Exception as error:
            if not left or SLOW_START not in str(error):
                raise
            ray.shutdown()


def _await_nodes(address: str, nodes: int) -> None:
    """Wait until that many machines have joined: verl would end at once for lack of GPUs."""
    import ray

    ray.init(address=address)
    until = time.monotonic() + JOIN_DEADLINE_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < nodes:
        if time.monotonic() > until:
            raise TimeoutError(f"{joined} of {nodes} machines joined the cluster within {JOIN_DEADLINE_S:.0f} s")
        time.sleep(1)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
