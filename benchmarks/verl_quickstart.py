"""The quickstart on verl and on the embedded trainer: does the reward rise alike? Both on the CPU, with the same YAML.

`python benchmarks/verl_quickstart.py [FOLDER]`; needs `.venv-verl` (`make test-verl` builds it). FOLDER keeps the runs:
one that is complete is not run again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import write_result

from ajet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
VERL_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
CHART = ROOT / "docs" / "assets" / "verl_reward.png"
STEPS = 40
ENVIRONMENT = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> None:
    if not VERL_PYTHON.exists():
        print("left out: there is no .venv-verl (`make test-verl` builds it)")
        return
    keep = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    root = keep or Path(tempfile.mkdtemp(prefix="ajet-verl-"))
    try:
        pythons = {"local": Path(sys.executable), "verl": VERL_PYTHON}
        runs = {backbone: conduct(backbone, python, root / backbone) for backbone, python in pythons.items()}
    finally:
        if keep is None:
            shutil.rmtree(root)
    pairs = zip(runs["local"]["validation"].values(), runs["verl"]["validation"].values(), strict=True)
    figures = {**runs, "largest_validation_difference": max(abs(one - other) for one, other in pairs)}
    draw(runs)
    print(write_result("verl", figures))


def conduct(backbone: str, python: Path, folder: Path) -> dict[str, Any]:
    """One run, and what it came to."""
    metrics = folder / "quickstart" / "metrics.jsonl"
    if len(trained(metrics)) < STEPS:
        command = [
            str(python), "-m", "ajet", "--conf", str(ROOT / "configs" / "quickstart.yaml"), f"--backbone={backbone}",
            "--exp-dir", str(folder), f"trainer_common.total_training_steps={STEPS}",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    steps = trained(metrics)
    validation = {step["step"]: step["val/reward/mean"] for step in read_metrics(metrics) if "val/reward/mean" in step}
    result: dict[str, Any] = {
        "reward": [round(step["reward/mean"], 4) for step in steps],
        "validation": {step: round(reward, 4) for step, reward in validation.items()},
    }
    gaps = [step["train/sampler_gap"] for step in steps if "train/sampler_gap" in step]
    return result | ({"largest_sampler_gap": max(gaps)} if gaps else {})


def trained(metrics: Path) -> list[dict[str, Any]]:
    return [step for step in read_metrics(metrics) if "reward/mean" in step]


def draw(runs: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), dpi=110, layout="constrained")
    for (backbone, run), colour in zip(runs.items(), ("#d1662b", "#4152d6"), strict=True):
        axes.plot(range(1, STEPS + 1), run["reward"], color=colour, alpha=0.35, linewidth=1)
        axes.plot(
            list(run["validation"]), list(run["validation"].values()), color=colour, marker="o", markersize=4,
            linestyle="--" if backbone == "verl" else "-", label=f"{backbone}, validation",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title="The quickstart on both backbones (pale: training)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(CHART)


if __name__ == "__main__":
    main()
