"""Do the tutorials teach a tiny model what they promise? Runs them as their READMEs say, and draws their curves.

    python benchmarks/tutorials.py [--only learning_to_ask] [--keep FOLDER] [--draw]

With `--only`, that tutorial's figures replace the ones in the file. FOLDER keeps the runs: one that is complete is not
run again. `--draw` only draws the charts in docs/assets/tutorials anew, also of other benchmarks' figures. The frozen
lake needs `pip install gymnasium`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _tutorial_pictures import write_pictures
from common import ROOT, ajet_command, is_complete, known_figures, validations, write_result

from ajet.config import load_config
from ajet.observe.metrics import read_metrics

CHARTS = ROOT / "docs" / "assets" / "tutorials"
TUTORIALS: dict[str, list[str]] = {
    "frozenlake": ["frozenlake.yaml"],
    "countdown": ["cold_start.yaml", "countdown.yaml"],
    "werewolves": ["cold_start.yaml", "werewolves.yaml"],
    "learning_to_ask": ["cold_start.yaml", "learning_to_ask.yaml"],
    "rubrics_judge": ["cold_start.yaml", "rubrics_judge.yaml"],
    "feedback_tracing": ["cold_start.yaml", "feedback_tracing.yaml"],
}
"""The configs of each, in order; a later one starts from the weights of the one before it."""
WINDOW = 5
"""Steps over which the training reward is averaged in a chart."""


def conduct(name: str, folder: Path) -> dict[str, Any]:
    """The runs of a tutorial, and what the last one came to."""
    if (traces := ROOT / "tutorial" / f"example_{name}" / "make_traces.py").exists():
        subprocess.run([sys.executable, str(traces)], check=True)
    weights: list[str] = []
    for file in TUTORIALS[name]:
        conf = ROOT / "tutorial" / f"example_{name}" / file
        config = load_config(conf, weights, complete=False).ajet
        made = folder / config.experiment_name
        if not is_complete(made, config.trainer_common.total_training_steps):
            subprocess.run(ajet_command(conf, folder, *weights), cwd=ROOT, check=True)
        weights = [f"model.path={made / 'hf'}"]
    steps = read_metrics(made / "metrics.jsonl")
    result = {
        "seconds": round(sum(step.get("time/step", 0) + step.get("time/validate", 0) for step in steps)),
        "reward": validations(steps),
        "success": validations(steps, "success"),
        "training": [round(step["reward/mean"], 3) for step in steps if "reward/mean" in step],
    }
    rewards = list(result["reward"].values())
    print(f"{name:18} {rewards[0]:.3f} -> {rewards[-1]:.3f}  {result['seconds']} s", flush=True)
    return result


def curves() -> dict[str, dict[str, Any]]:
    """The figures of every tutorial that has any: rewards by step, and the training rewards if they were kept."""
    found = {}
    if quickstart := known_figures("quickstart").get("seed 0"):
        found["quickstart"] = {"reward": quickstart["validation"]}
    if coding_agent := known_figures("coding_agent").get("seed 1"):
        found["coding_agent"] = coding_agent
    return found | known_figures("tutorials")


def draw(name: str, figures: dict[str, Any]) -> None:
    """One chart: validation with dots, training as a pale line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.6, 2.5), dpi=110, layout="constrained")
    if training := figures.get("training"):
        smooth = [
            sum(part) / len(part) for n in range(len(training)) for part in [training[max(0, n - WINDOW + 1) : n + 1]]
        ]
        axes.plot(range(1, len(training) + 1), smooth, color="#4152d6", alpha=0.35, linewidth=1, label="training")
    steps, rewards = [int(step) for step in figures["reward"]], list(figures["reward"].values())
    axes.plot(steps, rewards, color="#4152d6", marker="o", markersize=4, linewidth=1.5, label="validation")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, None), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if training:
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(CHARTS / f"{name}_reward.png")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(TUTORIALS))
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    figures = known_figures("tutorials")
    with tempfile.TemporaryDirectory() as scratch:
        chosen = [] if arguments.draw else [arguments.only] if arguments.only else list(TUTORIALS)
        for name in chosen:
            figures[name] = conduct(name, arguments.keep or Path(scratch))
    if chosen:
        write_result("tutorials", figures)
    CHARTS.mkdir(parents=True, exist_ok=True)
    write_pictures(CHARTS)
    for name, found in curves().items():
        draw(name, found)


if __name__ == "__main__":
    main()
