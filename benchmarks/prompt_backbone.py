"""The prompt backbone: 50 kills of a search, and its overhead besides episodes.

Overhead: the share of a search's time in which no episode runs, with the embedded tiny model and a proposer that costs
nothing. What the backbone does meanwhile (choosing, checking, writing and syncing the history) doesn't grow with the
model, so with real episodes the share is smaller.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backbone" / "prompt"))

from searchers import project
from test_killed_searches import kill_and_resume

from ajet.backbone import LaunchOptions
from ajet.backbone.prompt.loop import PromptRun
from ajet.config import load_config
from ajet.observe.experiment import ExperimentFolder
from ajet.task_rollout.pool import RolloutPool

KILLS = 50
ROUNDS = 6


class BusyPool:
    """How long at least one group was running."""

    def __init__(self) -> None:
        self.seconds, self.groups = 0.0, 0
        self._running, self._since = 0, 0.0
        self._original = RolloutPool.run_group

    async def run_group(self, pool: RolloutPool, *given: Any, **keys: Any) -> Any:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1
        try:
            return await self._original(pool, *given, **keys)
        finally:
            self.groups += 1
            self._running -= 1
            if not self._running:
                self.seconds += time.perf_counter() - self._since


def overhead(folder: Path, algorithm: str) -> dict[str, float]:
    """One search; the first round isn't counted, while the model loads."""
    folder.mkdir()
    conf = project(folder, algorithm=algorithm, tasks=48, prompt_tuning__rounds=ROUNDS)
    config = load_config(conf, backbone="prompt")
    config.ajet.backbone = "prompt"
    busy, began = BusyPool(), [0.0, 0.0]

    class Measured(PromptRun):
        async def _tune(self, search: Any) -> None:
            await search.validate(search.start)  # the model is loaded
            began[:] = [time.perf_counter(), busy.seconds]
            await super()._tune(search)
            began[:] = [time.perf_counter() - began[0], busy.seconds - began[1]]

    async def run_group(pool: RolloutPool, *given: Any, **keys: Any) -> Any:
        return await busy.run_group(pool, *given, **keys)

    RolloutPool.run_group = run_group  # type: ignore[method-assign]
    try:
        with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=conf, backbone="prompt") as experiment:
            Measured(config, experiment, LaunchOptions(quiet=True)).run()
    finally:
        RolloutPool.run_group = busy._original  # type: ignore[method-assign]
    total, running = began
    return {"seconds": total, "episodes": busy.groups, "overhead": 1 - running / total}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        figures: dict[str, Any] = {name: overhead(folder / name, name) for name in ("apo", "gepa", "best_of")}
        began = time.perf_counter()
        rounds = kill_and_resume(folder / "kills", KILLS, seed=1)
        figures["kills"] = {"kills": KILLS, "rounds": rounds, "lost": 0, "seconds": time.perf_counter() - began}
    figures["load"] = os.getloadavg()[0]
    write_result("prompt_backbone", figures)
    for name in ("apo", "gepa", "best_of"):
        print(f"{name}: {figures[name]['overhead']:.1%} of {figures[name]['seconds']:.1f} s without a running episode")
    print(f"{KILLS} kills, {rounds} rounds announced; none was lost, and the best was always on disk")


if __name__ == "__main__":
    main()
