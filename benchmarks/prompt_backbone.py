"""The prompt backbone: 50 kills of a search, and its overhead besides episodes. `overhead` as argument: no kills.

Overhead: the share of a search's processor time (all threads) that is spent while no episode runs: choosing, checking,
asking a proposer that costs nothing, writing and syncing the history. Two kinds of episodes: `toy`, one call of four
tokens, and those of `tutorial/example_prompt_tuning`, three calls each to a model of 0.3 M parameters. Neither share
grows with the model. `waiting` is the same share of the time on the clock, which a busy machine makes larger. What is
loaded once (model, gepa) and the start's validation aren't counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import known_figures, write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "backbone" / "prompt")]

from test_killed_searches import kill_and_resume

from ajet.backbone import LaunchOptions
from ajet.backbone.prompt.loop import PromptRun
from ajet.config import load_config
from ajet.observe.experiment import ExperimentFolder
from ajet.task_runner.pool import RolloutPool
from support.searchers import project

KILLS = 50
ROUNDS = 6
TUTORIAL_ROUNDS = {"apo": 3, "gepa": 24, "best_of": 3}
"""A round of gepa has few episodes."""
TUTORIAL = Path(__file__).parents[1] / "tutorial" / "example_prompt_tuning" / "prompt_tuning.yaml"


class Spent(NamedTuple):
    """On the clock, and of the processor."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Spent) -> Spent:
        return Spent(self.wall - earlier.wall, self.cpu - earlier.cpu)

    def plus(self, more: Spent) -> Spent:
        return Spent(self.wall + more.wall, self.cpu + more.cpu)


class BusyPool:
    """What was spent while at least one group was running."""

    def __init__(self) -> None:
        self.spent, self.groups = Spent(0.0, 0.0), 0
        self._running, self._since = 0, Spent.now()
        self._original = RolloutPool.run_group

    async def run_group(self, pool: RolloutPool, *given: Any, **keys: Any) -> Any:
        if not self._running:
            self._since = Spent.now()
        self._running += 1
        try:
            return await self._original(pool, *given, **keys)
        finally:
            self.groups += 1
            self._running -= 1
            if not self._running:
                self.spent = self.spent.plus(Spent.now().since(self._since))


def overhead(folder: Path, algorithm: str, tutorial: bool = False) -> dict[str, float]:
    """One search, after the validation of its start."""
    folder.mkdir()
    if algorithm == "gepa":
        import gepa  # noqa: F401 - loaded once, like the model
    if tutorial:
        keys = [f"prompt_tuning.algorithm={algorithm}", f"prompt_tuning.rounds={TUTORIAL_ROUNDS[algorithm]}"]
        conf = TUTORIAL
    else:
        keys, conf = [], project(folder, algorithm=algorithm, tasks=48, prompt_tuning__rounds=ROUNDS)
    config = load_config(conf, keys, backbone="prompt")
    config.ajet.backbone = "prompt"
    busy, began = BusyPool(), [Spent(0.0, 0.0)] * 2

    class Measured(PromptRun):
        async def _tune(self, search: Any) -> None:
            await search.validate(search.start)  # the model is loaded
            before, running, busy.groups = Spent.now(), busy.spent, 0
            await super()._tune(search)
            began[:] = [Spent.now().since(before), busy.spent.since(running)]

    async def run_group(pool: RolloutPool, *given: Any, **keys: Any) -> Any:
        return await busy.run_group(pool, *given, **keys)

    RolloutPool.run_group = run_group  # type: ignore[method-assign]
    try:
        with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=conf, backbone="prompt") as experiment:
            Measured(config, experiment, LaunchOptions(quiet=True)).run()
    finally:
        RolloutPool.run_group = busy._original  # type: ignore[method-assign]
    total, running = began
    return {
        "episodes": busy.groups,
        "cpu_seconds": round(total.cpu, 3),
        "overhead": round(1 - running.cpu / total.cpu, 4),
        "cpu_ms_per_episode": round(1000 * running.cpu / busy.groups, 2),
        "overhead_ms_per_episode": round(1000 * (total.cpu - running.cpu) / busy.groups, 2),
        "seconds": round(total.wall, 2),
        "waiting": round(1 - running.wall / total.wall, 4),
    }


def main(*what: str) -> None:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("apo", "gepa", "best_of"):
            figures[f"toy/{name}"] = overhead(folder / f"toy-{name}", name)
            figures[f"tutorial/{name}"] = overhead(folder / f"tutorial-{name}", name, tutorial=True)
        if "overhead" in what:
            figures["kills"] = known_figures("prompt_backbone")["kills"]
        else:
            began = time.perf_counter()
            rounds = kill_and_resume(folder / "kills", KILLS, seed=1)
            figures["kills"] = {"kills": KILLS, "rounds": rounds, "lost": 0, "seconds": time.perf_counter() - began}
    figures["load"] = os.getloadavg()[0]
    write_result("prompt_backbone", figures)
    for name, found in figures.items():
        if "/" in name:
            print(
                f"{name}: {found['overhead']:.1%} of {found['cpu_seconds']:.1f} CPU seconds, "
                f"{found['overhead_ms_per_episode']:.2f} ms beside {found['cpu_ms_per_episode']:.2f} ms per episode"
            )
    kills = figures["kills"]
    print(f"{kills['kills']} kills, {kills['rounds']} rounds announced; none was lost, and the best was always on disk")


if __name__ == "__main__":
    main(*sys.argv[1:])
