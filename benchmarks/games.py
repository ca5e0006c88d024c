"""Do the tutorials' games teach a model with random weights? Runs them as their READMEs say, with validations.

    python benchmarks/games.py [--only countdown]

The frozen lake needs `pip install gymnasium`. With `--only`, that game's figures replace the ones in the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

from ajet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
TUTORIAL = Path("tutorial")
GAMES: dict[str, list[Path]] = {
    "frozenlake": [TUTORIAL / "example_frozenlake" / "frozenlake.yaml"],
    "countdown": [
        TUTORIAL / "example_countdown" / "cold_start.yaml",
        TUTORIAL / "example_countdown" / "countdown.yaml",
    ],
}


def play(name: str, configs: list[Path], folder: Path) -> dict[str, Any]:
    """The runs of a game, one after the other, the second from the weights of the first; what the last one came to."""
    began = time.perf_counter()
    weights: list[str] = []
    for config in configs:
        experiment = f"{name}_{config.stem}"
        command = [sys.executable, "-m", "ajet", "--conf", str(config), "--exp-dir", str(folder), "--quiet"]
        subprocess.run([*command, f"experiment_name={experiment}", *weights], cwd=ROOT, check=True)
        weights = [f"model.path={folder / experiment / 'hf'}"]
    steps = read_metrics(folder / experiment / "metrics.jsonl")
    validated = [step for step in steps if "val/reward/mean" in step]
    trained = [step["reward/mean"] for step in steps if "reward/mean" in step]
    result = {
        "seconds": round(time.perf_counter() - began),
        "reward": {step["step"]: round(step["val/reward/mean"], 3) for step in validated},
        "success": {step["step"]: round(step["val/success"], 3) for step in validated},
        "training_reward_of_first_and_last_ten_steps": [
            round(sum(ten) / len(ten), 3) for ten in (trained[:10], trained[-10:])
        ],
    }
    rewards = list(result["reward"].values())
    print(f"{name:12} {rewards[0]:.3f} -> {rewards[-1]:.3f}  {result['seconds']} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(GAMES))
    arguments = parser.parse_args()
    before = RESULTS / "games.json"
    figures: dict[str, Any] = json.loads(before.read_text())["figures"] if before.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in [arguments.only] if arguments.only else list(GAMES):
            figures[name] = play(name, GAMES[name], Path(scratch))
    write_result("games", figures)


if __name__ == "__main__":
    main()
