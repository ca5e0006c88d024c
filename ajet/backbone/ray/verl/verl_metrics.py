"""verl's metrics under the names that every backbone uses; what has no such name stays under `verl/`."""

from __future__ import annotations

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
