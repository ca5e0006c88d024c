"""What isolation costs: the quickstart's steps with workflows in threads, in a process for each episode, and in
processes that stay.

The arms run in turn, in the same minutes, and their median steps are compared; a step of the quickstart is 64 episodes
of a model with 0.34 M parameters and one update, so hardly anything hides the cost. What no isolation can save is
measured beside it: the CPU time of processes that are forked from the same server and end at once, or after they have
opened an event loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, ajet_command, write_result

from ajet.observe.metrics import read_metrics

STEPS = 8
TURNS = 3
ARMS = {
    "threads": ["asyncio-with-gc"],
    "processes": ["multi-processing"],
    "processes_that_stay": ["multi-processing", "task_runner.process_lifetime=run"],
}
"""The kind of runner, and other keys."""
EPISODES = 64
"""In a step."""
WARM_UP = 2
"""Steps at the start of a run that aren't counted."""
SHORT = [
    f"trainer_common.total_training_steps={STEPS}", "trainer_common.val_before_train=false",
    "trainer_common.test_freq=1000",
]  # fmt: skip


def steps(arm: list[str], folder: Path) -> list[dict[str, Any]]:
    """One run's steps."""
    settings = [f"task_runner.wrapper_type={arm[0]}", *arm[1:], *SHORT]
    command = ajet_command(ROOT / "configs" / "quickstart.yaml", folder, *settings)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    metrics = read_metrics(folder / "quickstart" / "metrics.jsonl")
    return [step for step in metrics if "time/step" in step][WARM_UP:]


def fork_costs() -> dict[str, float]:
    """In a process of its own: milliseconds of CPU for each child, the server's part included."""
    from ajet.config import load_config
    from ajet.task_runner.processes import ForkServer

    config = load_config(ROOT / "configs" / "quickstart.yaml")
    control, _ = socket.socketpair()
    ForkServer(control, {"config": config.model_dump(mode="json"), "base_dirs": [str(ROOT)]})

    async def nothing() -> None: ...

    gc.collect()
    gc.freeze()
    bodies: dict[str, Callable[[], Any]] = {"ends": lambda: None, "opens_a_loop": lambda: asyncio.run(nothing())}
    return {name: round(_child_ms(body), 2) for name, body in bodies.items()}


def _child_ms(body: Callable[[], Any], children: int = 300) -> float:
    def used() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    before = used()
    for _ in range(children):
        if not (process := os.fork()):
            body()
            os._exit(0)
        os.waitpid(process, 0)
    return 1e3 * (used() - before) / children


def main() -> None:
    if sys.argv[1:] == ["forks"]:
        print(json.dumps(fork_costs()))
        return
    forks = json.loads(subprocess.check_output([sys.executable, __file__, "forks"], cwd=ROOT))
    seconds: dict[str, dict[str, list[float]]] = {arm: {"step": [], "rollout": []} for arm in ARMS}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(TURNS):
            for arm, keys in ARMS.items():
                for step in steps(keys, Path(place) / f"{arm}-{turn}"):
                    for part, values in seconds[arm].items():
                        values.append(step[f"time/{part}"])
    medians = {
        arm: {part: round(median(values), 3) for part, values in parts.items()} for arm, parts in seconds.items()
    }
    floor = medians["threads"]["step"] + EPISODES * forks["opens_a_loop"] / 1e3 / (os.cpu_count() or 1)
    ratios = {arm: round(medians[arm]["step"] / medians["threads"]["step"], 2) for arm in list(ARMS)[1:]}
    figures = {
        "median_seconds": medians,
        "ratio_of_steps": ratios,
        "cpu_ms_of_a_child_that": forks,
        "floor_of_the_ratio": round(floor / medians["threads"]["step"], 2),
    }
    print(write_result("isolated_workflows", figures), figures)


if __name__ == "__main__":
    main()
