"""The metric names that every backbone shares, and the translations into them.

| prefix | what |
|---|---|
| `train/…` | `loss`, `policy_loss`, `kl`, `entropy`, `clip_fraction`, `grad_norm`, `lr`, `staleness`, `sampler_gap` |
| `time/…` | seconds of a step and its phases: `step`, `rollout`, `train`, `sync`, `checkpoint` |
| `perf/…` | `tokens_per_second`, `memory_gb` |
| `val/…` | a validation's metrics |

`ajet.backbone.episode_metrics` lists the names of what comes from episodes: `return/…`, `reward/…`, `success/…`, …
A metric of verl's or Trinity's without a shared name keeps its own, under `verl/` or `trinity/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = {
    "return/mean": "train/return/mean",
    "reward/mean": "train/reward/mean",
    "success/rate": "train/success",
    "loss/total": "train/loss",
    "loss/kl": "train/kl",
    "loss/entropy": "train/entropy",
    "loss/clip_fraction": "train/clip_fraction",
    "tokens/packing_ratio": "train/packing_ratio",
}
"""Metrics of a training step's episodes and of the embedded trainer that also appear under a shared name."""

VERL = {
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
KEPT_BY_VERL = ("return/", "reward/", "success/", "episode/", "groups/", "status/", "outcome/", "failure/",
                "masked/", "dropped/", "fork/", "time/", "user/", "tag/", "val/", "credit/", "train/")  # fmt: skip
"""Prefixes of names that reach verl from our sampler and collector, and come back as they are."""

TRINITY = {
    "loss/total": "train/loss",
    "loss/policy": "train/policy_loss",
    "loss/kl": "train/kl",
    "loss/entropy": "train/entropy",
    "loss/clip_fraction": "train/clip_fraction",
    "loss/sampler_gap_max": "train/sampler_gap",
    "actor/final_loss": "train/loss",
    "actor/pg_loss": "train/policy_loss",
    "actor/kl_loss": "train/kl",
    "actor/entropy": "train/entropy",
    "actor/clip_fraction": "train/clip_fraction",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "time/train_step": "time/train",
    "time/sync_weight": "time/sync",
    "time/save_checkpoint": "time/checkpoint",
    "explorer/time/wait_explore_step": "time/rollout",
    "perf/throughput": "perf/tokens_per_second",
}
KEPT_BY_TRINITY = ("train/", "tokens/", "loss/", "time/step", "time/update", "time/logprobs", "time/train_", "pack/",
                   "perf/")  # fmt: skip
"""Prefixes of names that reach Trinity from our trainer, and come back as they are."""


def step_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of a training step's metrics that have a shared name, under that name."""
    return {shared: metrics[own] for own, shared in STEP.items() if own in metrics}


def from_verl(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Translate one line of verl's metrics file; text is left out."""
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    return _renamed(numbers, VERL, KEPT_BY_VERL, "verl/")


def from_trinity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Translate one line of Trinity's metrics."""
    return _renamed(metrics, TRINITY, KEPT_BY_TRINITY, "trinity/")


def _renamed(
    metrics: Mapping[str, float], names: Mapping[str, str], kept: tuple[str, ...], prefix: str
) -> dict[str, float]:
    return {
        names.get(key) or (key if key.startswith(kept) else f"{prefix}{key}"): value for key, value in metrics.items()
    }
