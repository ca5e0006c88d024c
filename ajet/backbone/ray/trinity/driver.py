"""The process that conducts Trinity: `python -m ajet.backbone.ray.trinity.driver run.json`. The launcher watches it.

Explorer, trainer, synchronizer, scheduler and buffer are Trinity's actors. What Trinity's own launcher passes over (a
stage that failed, a trainer that stopped early) ends this process with an error that says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ajet.backbone.ray.collector import BOARD, EpisodeBoard
from ajet.backbone.ray.driver import die_with_parent
from ajet.backbone.ray.ray_start import JOIN_DEADLINE_S
from ajet.backbone.ray.trinity import plugin
from ajet.schema.errors import AjetError

CLOSING_S = 20.0
"""How long explorer and trainer may take to close what they hold."""
RAY_STARTS = 3
SLOW_START = "node timed out during startup"


class StageFailedError(AjetError):
    """Exploring or training ended before its time. Says who and why."""


def main(path: str) -> None:
    """Run what the launcher wrote."""
    die_with_parent()
    order = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        _conduct_order(order)
    except AjetError as error:
        Path(order["error_file"]).write_text(str(error), encoding="utf-8")
        raise


def _conduct_order(order: dict[str, Any]) -> None:
    plugin.install()

    from ajet.backbone.ray.trinity.compose import compose_trinity_config

    config = compose_trinity_config(order["settings"])
    config.check_and_update()
    _rewind_explorer(config, order.get("resumed_step"))
    _start_ray(order, config)
    conduct(config, order["payload"])


def _start_ray(order: dict[str, Any], config: Any) -> None:
    """Start again if Ray's daemons were too slow: it gives them 30 s, which a machine under load can exceed."""
    import ray

    runtime = {"env_vars": config.get_envs(), "worker_process_setup_hook": plugin.HOOK}
    for left in reversed(range(RAY_STARTS)):
        try:
            ray.init(namespace=config.ray_namespace, runtime_env=runtime, **order["ray"])
            break
        except Exception as error:
            if not left or SLOW_START not in str(error):
                raise
            ray.shutdown()
    until = time.monotonic() + JOIN_DEADLINE_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < order.get("nodes", 0):
        if time.monotonic() > until:
            raise TimeoutError(
                f"{joined} of {order['nodes']} machines joined the cluster within {JOIN_DEADLINE_S:.0f} s"
            )
        time.sleep(1)


def _rewind_explorer(config: Any, step: int | None) -> None:
    """The explorer may have been ahead of the trainer's last checkpoint; what it had in the queue is lost, so it takes
    those tasks again."""
    if step is None or config.mode != "both":
        return
    state = {"latest_iteration": step, "taskset_states": [{"current_index": step * config.buffer.batch_size}]}
    Path(config.checkpoint_job_dir, f"{config.explorer.name}_meta.json").write_text(json.dumps(state))


def conduct(config: Any, payload: str) -> None:
    """Explore, train, or both. Returns when it is done; raises when it is not."""
    import ray

    from ajet.backbone.ray.trinity.actors import AjetExplorer, AjetTrainer

    board = ray.remote(EpisodeBoard).options(name=BOARD, num_cpus=0).remote(payload)
    actors: dict[str, Any] = {}
    if config.mode in ("both", "explore", "colocate"):
        actors["explorer"] = AjetExplorer.get_actor(config)
    if config.mode in ("both", "train", "colocate"):
        actors["trainer"] = AjetTrainer.get_actor(config)
    watched = {board.watch.remote(): "board", board.trouble.remote(): "trouble"}
    _await({actor.prepare.remote(): name for name, actor in actors.items()}, watched)
    nccl = len(actors) == 2 and config.synchronizer.sync_method.value == "nccl"
    if nccl:
        _synchronize(config, "setup")
    _await({actor.sync_weight.remote(): name for name, actor in actors.items()}, watched)
    work = {"explorer": "explore", "trainer": "train"}
    _await({getattr(actor, work[name]).remote(): name for name, actor in actors.items()}, watched)
    if (reason := ray.get(board.reported.remote())) is not None:
        raise StageFailedError(reason)
    if "trainer" in actors:
        _check_complete(ray.get(actors["trainer"].steps_done.remote()), config)
    if nccl:
        _synchronize(config, "teardown")
    closing = [actor.shutdown.remote() for actor in actors.values()]
    ray.wait(closing, num_returns=len(closing), timeout=CLOSING_S)
    ray.shutdown()


def _await(running: dict[Any, str], watched: dict[Any, str]) -> None:
    """Return when all of these have ended well; raise as soon as anything goes wrong."""
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
                raise StageFailedError(f"the {who} died: {_first_line(error)}") from error
            except RayError as error:
                raise StageFailedError(f"the {who} failed: {_reason(error)}") from error
            if ref in watched:
                raise StageFailedError(str(result))
            del left[ref]


def _check_complete(done: int, config: Any) -> None:
    """Trinity's trainer ends quietly when it waits too long for rows."""
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


def _reason(error: Any) -> str:
    inner = getattr(error, "cause", None)
    return f"{type(inner).__name__}: {inner}" if isinstance(inner, BaseException) else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    named = next((line for line in lines if line.startswith("class_name:")), "")
    return (lines[0] if lines else type(error).__name__) + (f" ({named})" if named else "")


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # threads of Ray's and of libraries may outlive their work
