"""How many steps does the quickstart's agent need with a teacher, and how many with its reward alone?

The teacher is the model that a run of `configs/quickstart.yaml` ends with. Student and GRPO then start from the
quickstart's model and have four episodes per step: two tasks, each played twice.

    python benchmarks/distillation.py [--seeds 3] [--teacher FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, ajet_command, seeds_of, validations, write_result

from ajet.observe.metrics import read_metrics

CONF = ROOT / "configs" / "quickstart.yaml"
SMALL_STEPS = (
    "data.train_batch_size=2",
    "rollout.num_repeat=2",
    "trainer_common.optim.lr=5e-4",
    "trainer_common.optim.lr_scheduler_type=cosine",
    "trainer_common.total_training_steps=40",
    "trainer_common.test_freq=5",
    "trainer_common.save_freq=0",
)
GOAL = 0.9


def train(name: str, folder: Path, *overrides: str) -> dict[int, float]:
    """One run; validation reward by step."""
    subprocess.run(ajet_command(CONF, folder, f"experiment_name={name}", *overrides), cwd=ROOT, check=True)
    rewards = validations(read_metrics(folder / name / "metrics.jsonl"))
    print(f"{name:16}", *(f"{reward:.3f}" for reward in rewards.values()), flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher", type=Path, help="a trained model, instead of training one")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        teacher = arguments.teacher
        if teacher is None:
            figures["teacher"] = train("teacher", folder)
            teacher = folder / "teacher" / "hf"
        for seed in range(arguments.seeds):
            taught = f"trainer_common.algorithm.distillation.teacher={teacher}"
            for name, extra in (("distillation", [taught]), ("grpo", [])):
                rewards = train(f"{name}_{seed}", folder, *SMALL_STEPS, *seeds_of(seed), *extra)
                reached = next((step for step, reward in rewards.items() if reward >= GOAL), None)
                figures[f"{name} seed {seed}"] = {"validation": rewards, f"steps to {GOAL}": reached}
    write_result("distillation", figures)


if __name__ == "__main__":
    main()
