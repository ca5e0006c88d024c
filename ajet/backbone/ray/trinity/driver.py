"""The process that runs Trinity: `python -m ajet.backbone.ray.trinity.driver run.json`.

Explorer, trainer, synchronizer, scheduler and buffer are Trinity's actors. What Trinity's own launcher passes over (a
stage that failed, a trainer that stopped early) ends this process with an error that says so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ajet.backbone.ray.collector import COLLECTOR, HEAD, EpisodeCollector
from ajet.backbone.ray.facts import DriverInput, RunError, RunPayload, run_driver
from ajet.backbone.ray.start import PLATFORM, retry_slow_start, wait_for_nodes
from ajet.backbone.ray.trinity import HOOK, install
from ajet.backbone.ray.watcher import actor_named, first_line
from ajet.schema.errors import AjetError

CLOSING_S = 20.0


class StageFailedError(AjetError):
    """Exploring or training ended early. Says which, and why."""


def run_trinity(given: DriverInput) -> None:
    install()

    from ajet.backbone.ray.trinity.config import compose_trinity_config

    config = compose_trinity_config(given.settings)
    config.check_and_update()
    _share_episodes(config)
    _rewind_explorer(config, RunPayload.decode(given.payload).resumed_step)
    _start_ray(given, config)
    run_stages(config, given.payload)


def _start_ray(given: DriverInput, config: Any) -> None:
    import ray

    # a Ray that was there before this driver does not pass on the driver's environment
    platform = {name: os.environ[name] for name in {PLATFORM} & os.environ.keys()}
    runtime = {"env_vars": config.get_envs() | platform, "worker_process_setup_hook": HOOK}
    retry_slow_start(lambda: ray.init(namespace=config.ray_namespace, runtime_env=runtime, **given.ray))
    wait_for_nodes(given.nodes)


def _share_episodes(config: Any) -> None:
    """Tell the workflows how many processes share `rollout.max_env_worker`: Trinity may have fewer than it was asked
    for."""
    explorer, given = config.explorer, config.buffer.explorer_input
    for taskset in (*given.tasksets, *given.eval_tasksets):
        taskset.workflow_args["processes"] = explorer.runner_per_model * explorer.rollout_model.engine_num


def _rewind_explorer(config: Any, step: int | None) -> None:
    """The explorer may have been ahead of the trainer's last checkpoint, or of its start if there is none. What was in
    the queue is lost, so it takes those tasks again."""
    meta, done = Path(config.checkpoint_job_dir, f"{config.explorer.name}_meta.json"), step or 0
    if config.mode == "both" and (done or meta.exists()):
        state = {"latest_iteration": done, "taskset_states": [{"current_index": done * config.buffer.batch_size}]}
        meta.write_text(json.dumps(state))


def run_stages(config: Any, payload: str) -> None:
    """Explore, train, or both. Raises if it ends early."""
    import ray

    from ajet.backbone.ray.trinity.host import HOST, AjetExplorer, AjetTrainer, EpisodeHost

    collector = ray.remote(EpisodeCollector).options(name=COLLECTOR, num_cpus=0).remote(payload)
    actors: dict[str, Any] = {}
    watched = {collector.watch.remote(): "episode collector", collector.wait_for_failure.remote(): "episode collector"}
    if RunPayload.decode(payload).remote_runners and config.mode != "train":
        host = ray.remote(EpisodeHost).options(name=HOST, num_cpus=0, resources=HEAD).remote(payload)
        watched[host.watch.remote()] = "episode host"
    if config.mode in ("both", "explore"):
        actors["explorer"] = AjetExplorer.get_actor(config)
    if config.mode in ("both", "train"):
        actors["trainer"] = AjetTrainer.get_actor(config)
    _await({actor.prepare.remote(): name for name, actor in actors.items()}, watched)
    nccl = len(actors) == 2 and config.synchronizer.sync_method.value == "nccl"
    if nccl:
        _synchronize(config, "setup")
    _await({actor.sync_weight.remote(): name for name, actor in actors.items()}, watched)
    work = {"explorer": "explore", "trainer": "train"}
    _await({getattr(actor, work[name]).remote(): name for name, actor in actors.items()}, watched)
    if (reason := ray.get(collector.failure.remote())) is not None:
        raise StageFailedError(reason)
    if "trainer" in actors:
        _check_complete(ray.get(actors["trainer"].steps_done.remote()), config)
    if nccl:
        _synchronize(config, "teardown")
    ray.get(collector.close.remote())
    closing = [actor.shutdown.remote() for actor in actors.values()]
    ray.wait(closing, num_returns=len(closing), timeout=CLOSING_S)
    ray.shutdown()


def _await(running: dict[Any, str], watched: dict[Any, str]) -> None:
    """Return when all of these have succeeded; raise as soon as anything goes wrong."""
    import ray
    from ray.exceptions import RayActorError, RayError

    left = dict(running)
    while left:
        ready, _ = ray.wait([*watched, *left], num_returns=1)
        for ref in ready:
            who = left.get(ref) or watched[ref]
            try:
                result = ray.get(ref)
            except RayActorError as error:
                which = actor_named(str(error).splitlines())
                raise StageFailedError(f"the {who} died: {first_line(error)}{which}") from error
            except RayError as error:
                raise StageFailedError(f"the {who} failed: {RunError.of(error).text}") from error
            if ref in watched:
                raise StageFailedError(str(result))
            del left[ref]


def _check_complete(done: int, config: Any) -> None:
    """Trinity's trainer ends silently when it waits too long for rows."""
    total = config.trainer.total_steps
    if config.mode == "train" and not done:
        path = config.buffer.trainer_input.experience_buffer.path
        raise StageFailedError(f"no batch to train in {path}: explore first (ajet.trinity.mode=explore)")
    if config.mode != "train" and done < total:
        raise StageFailedError(f"the trainer ended after {done} of {total} steps: no more rows came")


def _synchronize(config: Any, what: str) -> None:
    """Trinity's own order of steps for NCCL."""
    import ray
    from trinity.manager.synchronizer import Synchronizer

    synchronizer = Synchronizer.get_actor(namespace=config.ray_namespace)
    ray.get(getattr(synchronizer, f"coordinate_weight_sync_{what}").remote())


if __name__ == "__main__":
    run_driver(sys.argv[1], run_trinity)
    sys.stdout.flush()
    os._exit(0)  # threads of Ray and of other libraries may outlive their work
