"""The process that runs verl: `python -m ajet.backbone.ray.verl.driver run.json`.

Everything it starts dies with it: Ray's daemons by the kernel's parent-death signal, their workers with them.
"""

from __future__ import annotations

import os
import sys

from ajet.backbone.ray.facts import DriverInput, RunPayload, run_driver
from ajet.backbone.ray.start import PLATFORM, retry_slow_start, wait_for_nodes
from ajet.backbone.ray.verl import METRICS_PATH
from ajet.backbone.ray.verl.config import compose_verl_config, pass_through
from ajet.schema.errors import UserError


def run_verl(given: DriverInput) -> None:
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    from ajet.backbone.ray.verl import plugin
    from ajet.backbone.ray.verl.worker import TrainerProcess

    plugin.require_entry_point()
    settings = given.settings | {f"ray_kwargs.ray_init.{key}": value for key, value in given.ray.items()}
    # a Ray that was there before this driver does not pass on the driver's environment
    for name in {METRICS_PATH, PLATFORM} & os.environ.keys():
        settings[f"ray_kwargs.ray_init.runtime_env.env_vars.{name}"] = os.environ[name]
    config = compose_verl_config(settings, given=pass_through(RunPayload.decode(given.payload).load_config()))
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)
    if (address := config.ray_kwargs.ray_init.address) != "local":
        look_at_cluster(address, given.nodes)
    retry_slow_start(lambda: run_ppo(config, task_runner_class=TrainerProcess))


QUEUE = {"name": "TransferQueueController", "namespace": "transfer_queue"}
"""verl's queue of rows: an actor of a Ray cluster, whose name no run can choose."""


def look_at_cluster(address: str, nodes: int) -> None:
    """Wait for the machines: verl would end at once for lack of GPUs. Refuse a cluster on which another run of verl is
    at work: each would train the other's rows."""
    import ray

    ray.init(address=address)
    try:
        wait_for_nodes(nodes)
        ray.get_actor(**QUEUE)
    except ValueError:  # there is none
        return
    finally:
        ray.shutdown()
    raise UserError(
        f"another run of verl is at work on the Ray cluster {address}, and verl's runs on one cluster share one queue "
        "of rows: wait until it has ended, or leave --ray-address out, for a Ray of this run alone"
    )


if __name__ == "__main__":
    run_driver(sys.argv[1], run_verl)
