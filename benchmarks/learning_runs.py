"""Does the training signal teach what it should, and nothing else? Tiny runs with controls, and on every backbone.

A random model of 0.3 M parameters is paid for vowels: by a continuous reward, a negative one, beside a second agent
that is not trained, and with a KL term that holds it. Controls have a learning rate of 0, or rewards that know nothing
of the reply. What is learned is measured on held-out questions.

    python benchmarks/learning_runs.py [--seeds 3] [--only continuous,negative] [--keep FOLDER]

The same YAML runs on verl and Trinity where there are `.venv-verl` and `.venv-trinity` (`make test-verl` and `make
test-trinity` build them). FOLDER keeps the runs: one that is complete is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ROOT, is_complete, seeds_of, validations, write_result

from ajet.backbone import LaunchOptions
from ajet.backbone.local import run
from ajet.config import load_config
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.metrics import read_metrics

HERE = Path(__file__).parent
CONF = HERE / "_learning_runs.yaml"
CHART = ROOT / "docs" / "assets" / "learning_runs.png"
RUNS: Mapping[str, tuple[str, ...]] = {
    "continuous": (),
    "negative": ("user.reward=negative",),
    "two agents": (f"rollout.user_workflow={HERE / '_learning_workflow.py'}->WithCritic",),
    "held by KL": ("trainer_common.kl_loss_coef=0.5",),
    "learning rate 0": ("trainer_common.optim.lr=0",),
    "shuffled reward": ("user.reward=shuffled",),
}
BACKBONES = ("verl", "trinity")
WINDOW = 5
"""Steps over which a training curve is averaged before curves are compared."""


def make_tasks(folder: Path) -> list[str]:
    """Training questions and others, as overrides of the YAML."""
    words = ["tell", "sing", "write", "name", "find", "call", "give", "show", "read", "ask", "try", "draw"]
    parts = {"training": words[:8], "validation": words[8:]}
    overrides = []
    for part, chosen in parts.items():
        file = folder / f"{part}.jsonl"
        tasks = [
            {"id": f"{word}-{thing}", "question": f"{word} {thing}", "held_out": part == "validation"}
            for word in chosen
            for thing in ("one", "two")
        ]
        file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        overrides.append(f"task_reader.jsonl_dataset_file.{part}.file_path={file}")
    return overrides


def train(name: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run in this process, and what it came to."""
    config = load_config(CONF, [f"experiment_name={name}", *overrides], backbone="local")
    total = config.ajet.trainer_common.total_training_steps
    if not is_complete(folder / name, total):
        with ExperimentFolder.open(config, exp_dir=folder, source_yaml=CONF, fresh=True) as experiment:
            run(config, experiment, LaunchOptions(quiet=True))
    found = outcome(folder / name)
    print(f"{name:24}", found["held_out"], f"kl {found.get('kl', float('nan')):.3f}", found["seconds"], "s", flush=True)
    return found


def outcome(path: Path) -> dict[str, Any]:
    """Rewards over training and on held-out questions, divergence at the end, and the tokens of each agent."""
    steps = read_metrics(path / "metrics.jsonl")
    trained = [step for step in steps if step["step"] and "reward/mean" in step]
    found: dict[str, Any] = {
        "held_out": validations(steps),
        "training": [round(step["reward/mean"], 3) for step in trained],
        "seconds": round(sum(step.get("time/step", 0) + step.get("time/validate", 0) for step in steps), 1),
        "updates": int(sum(step.get("train/updates", 0) for step in trained)),
    }
    kl = [step["train/kl"] for step in trained if "train/kl" in step]
    if kl:
        found["kl"] = round(sum(kl[-WINDOW:]) / len(kl[-WINDOW:]), 4)
    return found | tokens_by_agent(path)


def tokens_by_agent(path: Path) -> dict[str, Any]:
    """Sampled and trained tokens of the training episodes, by agent."""
    sampled: dict[str, int] = {}
    trained: dict[str, int] = {}
    store = EpisodeStore(path / "episodes.sqlite")
    try:
        for row in store.all():
            if row.validation:
                continue
            for call in row.episode.tree.calls:
                sampled[call.agent] = sampled.get(call.agent, 0) + len(call.mask)
                trained[call.agent] = trained.get(call.agent, 0) + int(call.mask.sum())
    finally:
        store.close()
    return {"sampled_tokens": sampled, "trained_tokens": trained}


def on_backbone(backbone: str, folder: Path, overrides: list[str]) -> dict[str, Any] | None:
    """The same YAML in verl's or Trinity's environment; None where there is none."""
    python = ROOT / f".venv-{backbone}" / "bin" / "python"
    if not python.exists():
        print(f"{backbone}: left out, because there is no {python}")
        return None
    total = load_config(CONF, overrides, backbone="local").ajet.trainer_common.total_training_steps
    if not is_complete(folder / "learning" / backbone, total):
        environment = {**os.environ, "AJET_PLATFORM": "cpu", "PYTHONPATH": str(ROOT)}
        command = [str(python), "-m", "ajet", "--conf", str(CONF), f"--backbone={backbone}", "--quiet", "--fresh"]
        subprocess.run(
            [*command, f"experiment_dir={folder / 'learning' / backbone}", *overrides],
            cwd=HERE,
            env=environment,
            check=True,
        )
    found = outcome(folder / "learning" / backbone)
    print(f"{backbone:24}", found["held_out"], flush=True)
    return found


def smoothed(rewards: list[float]) -> list[float]:
    """Means of windows that don't overlap."""
    return [sum(rewards[at : at + WINDOW]) / WINDOW for at in range(0, len(rewards) - WINDOW + 1, WINDOW)]


def compared(local: list[dict[str, Any]], other: dict[str, Any]) -> dict[str, Any]:
    """How far a curve is from the local one with the same seed, and from the band of all seeds."""
    curves = [smoothed(one["training"]) for one in local]
    mine = smoothed(other["training"])
    distance = max(abs(a - b) for a, b in zip(mine, curves[0], strict=True))
    bands = [(min(values), max(values)) for values in zip(*curves, strict=True)]
    outside = max(max(low - value, value - high, 0.0) for value, (low, high) in zip(mine, bands, strict=True))
    return {
        "largest_difference_from_local": round(distance, 3),
        "farthest_outside_the_band_of_local_seeds": round(outside, 3),
        "widest_band": round(max(high - low for low, high in bands), 3),
    }


def check(figures: Mapping[str, list[dict[str, Any]]]) -> None:
    """What must hold in every run."""
    for name, runs in figures.items():
        for found in runs:
            first, *_, last = found["held_out"].values()
            if name in ("continuous", "negative", "two agents"):
                assert last > first + 0.2, f"{name} did not learn: {found}"
            if name in ("learning rate 0", "shuffled reward"):
                assert abs(last - first) < 0.15, f"{name} should learn nothing: {found}"
            if name == "two agents":
                assert found["sampled_tokens"]["critic"] > 0 and found["trained_tokens"]["critic"] == 0, found
    if "held by KL" in figures and "continuous" in figures:
        for held, free in zip(figures["held by KL"], figures["continuous"], strict=True):
            assert held["kl"] < free["kl"] / 3, (held["kl"], free["kl"])


def draw(figures: Mapping[str, list[dict[str, Any]]], others: Mapping[str, dict[str, Any]]) -> None:
    """Training curves: means and bands over the seeds, and other backbones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), dpi=110, layout="constrained", sharey=True)
    for index, (name, runs) in enumerate(figures.items()):
        curves = np.array([list(one["held_out"].values()) for one in runs])
        steps = list(runs[0]["held_out"])
        left.plot(steps, curves.mean(0), color=f"C{index}", marker="o", markersize=3, label=name)
        left.fill_between(steps, curves.min(0), curves.max(0), color=f"C{index}", alpha=0.15, linewidth=0)
    left.set(xlabel="step", ylabel="share of vowels, held-out questions", title="local, three seeds")
    local = np.array([smoothed(one["training"]) for one in figures["continuous"]])
    at = [WINDOW * (index + 0.5) for index in range(local.shape[1])]
    right.plot(at, local.mean(0), color="C0", label="local")
    right.fill_between(at, local.min(0), local.max(0), color="C0", alpha=0.15, linewidth=0)
    for index, (name, found) in enumerate(others.items()):
        right.plot(at, smoothed(found["training"]), color=f"C{index + 1}", linestyle="--", label=name)
    right.set(xlabel="step", title="the same YAML, training reward")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(CHART)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join((*RUNS, *BACKBONES)))
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tasks = make_tasks(folder)
        figures = {
            name: [
                train(f"{name.replace(' ', '_')}_{seed}", folder, [*tasks, *seeds_of(seed), *own])
                for seed in range(arguments.seeds)
            ]
            for name, own in RUNS.items()
            if name in chosen
        }
        others = {}
        for backbone in BACKBONES:
            found = on_backbone(backbone, folder, [*tasks, *seeds_of(0)]) if backbone in chosen else None
            if found is not None:
                others[backbone] = found
    check(figures)
    if set(figures) != set(RUNS):
        return
    against = {name: compared(figures["continuous"], found) for name, found in others.items()}
    draw(figures, others)
    print(write_result("learning_runs", {"local": figures, "other backbones": others, "compared": against}))


if __name__ == "__main__":
    sys.exit(main())
