"""Does the tiny coding agent learn to run the tests first? The tutorial's two steps, the second with three seeds.

    python benchmarks/coding_agent.py [--keep FOLDER]

FOLDER keeps the runs: one that is complete is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, ajet_command, seeds_of, validations, write_result

from ajet.observe.metrics import read_metrics

TUTORIAL = ROOT / "tutorial" / "example_coding_agent" / "tiny"
SEEDS = (1, 2, 3)
CALLS = "user/agent/tool_calls"
"""Per episode: 1 if it edits without looking, 2 if it runs the tests first."""


def run(config: str, name: str, folder: Path, *settings: str) -> Path:
    """One run, unless it is there already. Returns its folder."""
    made = folder / name
    if not (made / "hf").exists():
        command = ajet_command(TUTORIAL / config, folder, f"experiment_name={name}", *settings)
        subprocess.run(command, cwd=ROOT, check=True)
    return made


def curve(made: Path) -> dict[str, Any]:
    """A run's validations."""
    steps = read_metrics(made / "metrics.jsonl")
    return {"reward": validations(steps), "tool_calls": validations(steps, CALLS)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(TUTORIAL / "make_data.py")], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        start = run("cold_start.yaml", "coding_agent_cold_start", folder)
        figures = {}
        for seed in SEEDS:
            made = run("learn.yaml", f"coding_agent_{seed}", folder, f"model.path={start / 'hf'}", *seeds_of(seed))
            figures[f"seed {seed}"] = curve(made)
            print(f"seed {seed}: {figures[f'seed {seed}']['reward']}", flush=True)
    write_result("coding_agent", figures)


if __name__ == "__main__":
    main()
