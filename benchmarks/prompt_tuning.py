"""How much better does an agent get by its prompt, and what does finding it cost?

The agent of `tutorial/example_prompt_tuning`, whose tiny model does what it is told, and a proposer that follows rules:
this measures the search, not a language model's writing. All algorithms have the same episodes to spend. `random`
rewrites the first prompt again and again, `best_of` the best one so far; neither reads an episode.

    python benchmarks/prompt_tuning.py [--seeds 3] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, ajet_command, write_result

CONF = ROOT / "tutorial" / "example_prompt_tuning" / "prompt_tuning.yaml"
CHART = ROOT / "docs" / "assets" / "prompt_tuning.svg"
ALGORITHMS = {
    "apo": (),
    "gepa": ("prompt_tuning.algorithm=gepa",),
    "best_of": ("prompt_tuning.algorithm=best_of",),
    "random": (f"prompt_tuning.algorithm={ROOT / 'benchmarks' / '_random_prompts.py'}->RandomSearch",),
}
EPISODES = 900

Record = dict[str, Any]


def command(name: str, folder: Path, *overrides: str) -> list[str]:
    settings = [f"prompt_tuning.budget.episodes={EPISODES}", "prompt_tuning.rounds=200", *overrides]
    return ajet_command(CONF, folder, "--backbone=prompt", f"experiment_name={name}", *settings)


def made(folder: Path, name: str) -> Path:
    """The run's folder."""
    return folder / f"{name}-prompt"


def history(folder: Path) -> list[Record]:
    """The lines that are complete."""
    file = folder / "prompts" / "history.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def search(name: str, folder: Path, *overrides: str) -> Record:
    """One run: the best validation over the episodes spent, and the confirmation."""
    began = time.perf_counter()
    subprocess.run(command(name, folder, *overrides), cwd=ROOT, check=True)
    seconds = time.perf_counter() - began
    events = history(made(folder, name))
    rounds = [event for event in events if event["event"] == "round"]
    confirmed = next((event for event in events if event["event"] == "confirmed"), None)
    best = yaml.safe_load((made(folder, name) / "prompts" / "best.yaml").read_text())
    figures = {
        "curve": [[event["spent"]["episodes"], round(event["score"], 4)] for event in rounds],
        "confirmed": None if confirmed is None else {
            key: confirmed[key] for key in ("before", "after", "low", "high", "within_noise")
        },
        "best": best["templates"],
        "seconds": round(seconds, 1),
    }  # fmt: skip
    end = "not better than the start" if confirmed is None else f"{confirmed['before']:.3f} → {confirmed['after']:.3f}"
    print(f"{name:12} {len(rounds) - 1:3} rounds  unseen tasks {end}  ({seconds:.0f} s)", flush=True)
    return figures


def chart(curves: dict[str, list[list[list[float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for number, (name, runs) in enumerate(curves.items()):
        for run in runs:
            episodes, scores = zip(*run, strict=True)
            axes.step(episodes, scores, where="post", color=f"C{number}", alpha=0.35, linewidth=1)
        grid = range(0, EPISODES + 1, 10)
        means = [sum(_at(run, episodes) for run in runs) / len(runs) for episodes in grid]
        axes.plot(list(grid), means, color=f"C{number}", linewidth=2, label=name)
    axes.set(xlabel="episodes spent", ylabel="best prompt, validation reward", ylim=(0, 1.02))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(CHART)


def _at(curve: list[list[float]], episodes: int) -> float:
    """The best score when this many episodes were spent; before the first validation, that of the start."""
    value = curve[0][1]
    for (_, _), (spent, score) in pairwise([[0, value], *curve]):
        if spent <= episodes:
            value = score
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where the runs stay")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        runs = {
            name: [search(f"{name}-{seed}", folder, f"rollout.seed={seed}", *overrides) for seed in range(given.seeds)]
            for name, overrides in ALGORITHMS.items()
        }
        figures: dict[str, Any] = {"episodes": EPISODES, "runs": runs}
    chart({name: [run["curve"] for run in found] for name, found in runs.items()})
    write_result("prompt_tuning", figures)


if __name__ == "__main__":
    main()
