"""verl's metrics under the names that every backbone uses; what has no such name stays under `verl/`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "actor/loss": "train/loss",
    "actor/pg_loss": "train/policy_loss",
    "actor/kl_loss": "train/kl",
    "actor/entropy": "train/entropy",
    "actor/clip_fraction": "train/clip_fraction",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "training/rollout_probs_diff_max": "train/sampler_gap",
    "training/off_policy/trajectory_staleness/mean": "train/staleness",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/train",
    "timing_s/update_weights": "time/sync",
    "timing_s/save_checkpoint": "time/checkpoint",
    "perf/throughput": "perf/tokens_per_second",
}
OURS = ("reward/", "success/", "episode/", "groups/", "status/", "outcome/", "failure/", "masked/", "dropped/", "fork/",
        "time/", "user/", "tag/", "val/", "credit/", "train/")  # fmt: skip
"""Names that come from our own sampler and board."""


def translate(metrics: dict[str, Any]) -> dict[str, float]:
    """One line of verl's metrics file."""
    return {_name(key): float(value) for key, value in metrics.items() if isinstance(value, int | float)}


def _name(key: str) -> str:
    return NAMES.get(key) or (key if key.startswith(OURS) else f"verl/{key}")


class MetricsTail:
    """Reads a JSONL file as it grows. A line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps that have been written since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = json.loads(line)
                yield int(record["step"]), translate(record["data"])
