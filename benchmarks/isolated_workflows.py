"""What isolation costs: the quickstart's steps with workflows in threads, and in a process for each episode.

Both arms run in turn, in the same minutes, and their median steps are compared; a step of the quickstart is 64 episodes
of a model with 0.34 M parameters and one update, so hardly anything hides the cost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import write_result

from ajet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
STEPS = 8
TURNS = 3
ARMS = {"threads": "asyncio-with-gc", "processes": "multi-processing"}
WARM_UP = 2
"""Steps at the start of a run that aren't counted."""
SHORT = [
    f"trainer_common.total_training_steps={STEPS}", "trainer_common.val_before_train=false",
    "trainer_common.test_freq=1000",
]  # fmt: skip


def steps(wrapper: str, folder: Path) -> list[dict[str, Any]]:
    """One run's steps."""
    command = [
        sys.executable, "-m", "ajet", "--conf", str(ROOT / "configs" / "quickstart.yaml"), "--exp-dir", str(folder),
        f"task_runner.wrapper_type={wrapper}", *SHORT,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    metrics = read_metrics(folder / "quickstart" / "metrics.jsonl")
    return [step for step in metrics if "time/step" in step][WARM_UP:]


def main() -> None:
    seconds: dict[str, dict[str, list[float]]] = {arm: {"step": [], "rollout": []} for arm in ARMS}
    with tempfile.TemporaryDirectory() as place:
        for turn in range(TURNS):
            for arm, wrapper in ARMS.items():
                for step in steps(wrapper, Path(place) / f"{arm}-{turn}"):
                    for part, values in seconds[arm].items():
                        values.append(step[f"time/{part}"])
    medians = {
        arm: {part: round(median(values), 3) for part, values in parts.items()} for arm, parts in seconds.items()
    }
    ratio = round(medians["processes"]["step"] / medians["threads"]["step"], 2)
    print(write_result("isolated_workflows", {"median_seconds": medians, "ratio_of_steps": ratio}), medians, ratio)


if __name__ == "__main__":
    main()
