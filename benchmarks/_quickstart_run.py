"""Runs the quickstart with one backbone on the CPU and reads its results, for benchmarks that compare two of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from common import ROOT, validations

from ajet.observe.metrics import read_metrics

STEPS = 40
ENVIRONMENT = {
    **os.environ, "AJET_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)
}  # fmt: skip
COLOURS = ("#d1662b", "#4152d6")


def conduct(backbone: str, python: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """One run, and what it came to."""
    metrics = folder / "quickstart" / "metrics.jsonl"
    if len(trained(metrics)) < STEPS:
        command = [
            str(python), "-m", "ajet", "--conf", str(ROOT / "configs" / "quickstart.yaml"), f"--backbone={backbone}",
            "--exp-dir", str(folder), f"trainer_common.total_training_steps={STEPS}", *overrides,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    steps = trained(metrics)
    result: dict[str, Any] = {
        "reward": [round(step["reward/mean"], 4) for step in steps],
        "validation": validations(read_metrics(metrics)),
    }
    gaps = [step["train/sampler_gap"] for step in steps if "train/sampler_gap" in step]
    return result | ({"largest_sampler_gap": max(gaps)} if gaps else {})


def trained(metrics: Path) -> list[dict[str, Any]]:
    return [step for step in read_metrics(metrics) if "reward/mean" in step]


def draw(runs: dict[str, dict[str, Any]], chart: Path) -> None:
    """Both curves; the second one dashed, as it may hide the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), dpi=110, layout="constrained")
    for (backbone, run), colour, line in zip(runs.items(), COLOURS, ("-", "--"), strict=True):
        axes.plot(range(1, STEPS + 1), run["reward"], color=colour, alpha=0.35, linewidth=1)
        axes.plot(
            list(run["validation"]), list(run["validation"].values()), color=colour, marker="o", markersize=4,
            linestyle=line, label=f"{backbone}, validation",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title="The quickstart on both backbones (pale: training)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(chart)
