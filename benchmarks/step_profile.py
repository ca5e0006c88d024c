"""Where the CPU seconds of a GRPO step go: which threads spend them, and what would be left to gain by more processes.

The agent and the batch of `grpo_step.py`, with the engine in the run's process and in its own. Each thread's CPU time
is read when a phase ends: unlike wall time, it hardly depends on what else the machine does. `rollout_floor` is the
least that a rollout can take on two cores when the engine has its own process and nobody ever waits: the longer of the
engine's CPU time and everybody else's.

    python benchmarks/step_profile.py --model FOLDER [--steps 12]      # the folder of `grpo_step.py --model`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import output_of, write_result
from grpo_step import make_model, write_job

HERE = Path(__file__).parent
WARM_UP = 2
"""Steps at the start that aren't counted."""
GROUPS = {"ajet-engine": "engine", "ajet-service": "service", "MainThread": "main"}
"""Threads by their names; those of episodes have other names, and torch's helpers none."""

Snapshot = dict[str, float]


def thread_seconds() -> Snapshot:
    """CPU seconds so far, by group of threads; `all` has those of threads that have ended too."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: defaultdict[str, float] = defaultdict(float)
    for task, seconds in _tasks():
        name = names.get(task)
        spent["helpers" if name is None else GROUPS.get(name, "episodes")] += seconds
    spent["wall"] = time.perf_counter()
    spent["all"] = time.process_time()
    return dict(spent)


def _tasks() -> Iterator[tuple[int, float]]:
    """This process's threads and their CPU seconds."""
    for task in Path("/proc/self/task").iterdir():
        try:
            yield int(task.name), int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue  # it ended just now


def child(conf: Path, folder: Path) -> None:
    """One run in this process; prints each step's seconds as JSON."""
    from ajet.backbone.local.learner import Learner
    from ajet.cli.main import main as ajet

    marks: list[tuple[Snapshot, Snapshot]] = []
    update = Learner.update

    def measured(self: Learner, *arguments: Any) -> dict[str, float]:
        before = thread_seconds()
        metrics = update(self, *arguments)
        marks.append((before, thread_seconds()))
        return metrics

    Learner.update = measured  # type: ignore[method-assign]
    code = ajet(["--conf", str(conf), "--exp-dir", str(folder), "--quiet", "--fresh"])
    if code:
        raise SystemExit(code)
    rollouts = [_spent(after, before) for (_, after), (before, _) in pairwise(marks)]
    updates = [_spent(before, after) for before, after in marks[1:]]
    print("\n" + json.dumps({"between_updates": _medians(rollouts), "update": _medians(updates)}))


def _spent(before: Snapshot, after: Snapshot) -> Snapshot:
    return {name: after[name] - before.get(name, 0.0) for name in after}


def _medians(phases: list[Snapshot]) -> Snapshot:
    counted = phases[WARM_UP:]
    names = {name for phase in counted for name in phase}
    return {name: round(statistics.median(phase.get(name, 0.0) for phase in counted), 3) for name in sorted(names)}


def profile(model: Path, folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """A run with this many torch threads."""
    conf = write_job(f"profile_{threads}", model, folder, steps)
    said = output_of([sys.executable, str(Path(__file__)), "--child", str(conf), str(folder)], threads)
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    rollout = found["between_updates"]
    found["rollout_floor"] = round(max(rollout["engine"], rollout["all"] - rollout["engine"]), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="where the model is kept between runs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept = arguments.model or folder / "model"
        if not (kept / "hf").is_dir():
            make_model(kept)
        figures: dict[str, Any] = {"load_at_start": round(os.getloadavg()[0], 1)}
        for threads in arguments.threads:
            name = f"{threads} thread{'s' if threads > 1 else ''}"
            figures[name] = profile(kept / "hf", folder, arguments.steps, threads)
            print(json.dumps({name: figures[name]}, indent=1), flush=True)
    write_result("step_profile", figures)


if __name__ == "__main__":
    main()
