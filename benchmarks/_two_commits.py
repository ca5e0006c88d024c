"""Two commits side by side: the commands that people wait for, alternating, on one machine.

    python benchmarks/_two_commits.py OLD [NEW] [--times 5] [--only demo grpo_step]

Both run with this environment's packages, from a clean checkout of each. The first of all runs is thrown away: it warms
the files. Figures are medians, and a ratio above 1 means that the newer commit is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write_result

PYTHON = sys.executable
COMMANDS = {
    "import_ajet": [PYTHON, "-c", "import ajet.cli.main"],
    "help": [PYTHON, "-m", "ajet", "--help"],
    "tracker": [PYTHON, "benchmarks/context_tracker.py", "--turns", "50", "200", "--repeats", "3", "--no-chart"],
    "gateway": [PYTHON, "benchmarks/gateway.py", "--quick"],
    "grpo_step": [PYTHON, "benchmarks/grpo_step.py", "--model", "{kept}/model", "--threads", "1"],
    "demo": [PYTHON, "-m", "ajet", "--conf", "configs/quickstart.yaml", "--exp-dir", "{fresh}", "--quiet"],
}
"""Timed as a whole. `tracker`, `grpo_step` and `gateway` also print figures of their own, which `printed` reads."""


def checkout(commit: str, folder: Path) -> Path:
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", folder, commit], check=True)
    return folder


def run(name: str, tree: Path, kept: Path) -> dict[str, float]:
    """One run's wall and CPU seconds, and what it printed of itself."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package is compiled, too
    }
    with tempfile.TemporaryDirectory() as fresh:
        command = [part.format(kept=kept, fresh=fresh) if "{" in part else part for part in COMMANDS[name]]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{name} of {tree.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, **printed(name, done.stdout)}


def printed(name: str, text: str) -> dict[str, float]:
    if name == "tracker":  # a commit may measure more than the other, so the whole tells little
        rows = re.findall(r"^(\S+) (\d+) \{.*'cpu_s': ([\d.]+)", text, re.MULTILINE)
        return {f"{shape}_{turns}_turns": float(seconds) for shape, turns, seconds in rows}
    if name not in ("grpo_step", "gateway"):
        return {}
    said = json.loads(text[text.index("{\n") :])
    if name == "grpo_step":
        ours = said["1"]["ajet"]
        return {"step": ours["step_seconds"], "rollout": ours["rollout"], "train": ours["train"]}
    figures = {}
    for row in said["stub_engine"]:
        figures[f"p50_ms_{row['concurrency']}"] = row["added_p50_ms"]
        figures[f"cpu_ms_{row['concurrency']}"] = row["cpu_ms_per_request"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    arguments = parser.parse_args()
    figures: dict[str, object] = {"old": arguments.old, "new": arguments.new, "times": arguments.times}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trees = {name: checkout(getattr(arguments, name), folder / name) for name in ("old", "new")}
        try:
            for command in arguments.only:
                run(command, trees["new"], folder)
                runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
                for _ in range(arguments.times):
                    for name, tree in trees.items():
                        runs[name].append(run(command, tree, folder))
                figures[command] = compared(runs)
                print(command, json.dumps(figures[command]), flush=True)
        finally:
            for tree in trees.values():
                subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    write_result("two_commits", figures)


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    table = {}
    for figure in runs["new"][0]:
        old, new = (statistics.median(one[figure] for one in runs[name]) for name in ("old", "new"))
        table[figure] = {"old": round(old, 4), "new": round(new, 4), "ratio": round(new / old, 3)}
    return table


if __name__ == "__main__":
    main()
