"""Does the quickstart learn, and only from its reward? Three seeds, a learning rate of 0, and a shuffled reward.

Each is a whole run of `configs/quickstart.yaml` in a separate process.

    python benchmarks/quickstart.py [--seeds 3] [--only "seed 1"]

With `--only`, that run's figures replace the ones in the file.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, ajet_command, known_figures, seeds_of, validations, write_result

from ajet.observe.metrics import read_metrics

CONF = ROOT / "configs" / "quickstart.yaml"

SHUFFLED = '''
"""The quickstart's agent with a reward that has nothing to do with what it did."""

import hashlib

from workflow import QuickstartWorkflow


class Shuffled(QuickstartWorkflow):
    name: str = "shuffled"

    async def execute(self, workflow_task, tuner):
        output = await super().execute(workflow_task, tuner)
        if workflow_task.task_id.startswith("train"):
            key = f"{workflow_task.episode_uuid}".encode()
            output.reward = float(hashlib.sha256(key).digest()[0] < 128)
        return output
'''


def conduct(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """One run; validation rewards and seconds."""
    began = time.perf_counter()
    command = ajet_command(CONF, folder, f"experiment_name={name}", *overrides)
    done = subprocess.run(command, cwd=ROOT, check=False)
    rewards = validations(read_metrics(folder / name / "metrics.jsonl"))
    result = {
        "exit_code": done.returncode,
        "seconds": time.perf_counter() - began,
        "first": next(iter(rewards.values())),
        "last": list(rewards.values())[-1],
        "validation": rewards,
    }
    print(f"{name:16} {result['first']:.3f} -> {result['last']:.3f}  {result['seconds']:.0f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="one of the runs: seed 0, seed 1, …, lr=0, shuffled reward")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = (CONF.parents[1] / "tutorial/example_math_agent/quickstart/workflow.py").read_text()
        (folder / "workflow.py").write_text(source)
        (folder / "shuffled.py").write_text(SHUFFLED)
        runs = {f"seed {seed}": seeds_of(seed) for seed in range(arguments.seeds)}
        runs["lr=0"] = ["trainer_common.optim.lr=0"]
        runs["shuffled reward"] = [f"rollout.user_workflow={folder / 'shuffled.py'}->Shuffled"]
        chosen = [arguments.only] if arguments.only else list(runs)
        figures = {name: conduct(name.replace(" ", "_").replace("=", "_"), folder, *runs[name]) for name in chosen}
    if arguments.only:
        known = known_figures("quickstart") | figures
        figures = {name: known[name] for name in runs if name in known}
    write_result("quickstart", figures)


if __name__ == "__main__":
    main()
