"""Trinity's metrics under the names that every backbone uses; what has no such name stays under `trinity/`."""

from __future__ import annotations

from typing import Any

NAMES = {
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
OURS = ("train/", "tokens/", "loss/", "time/step", "time/update", "time/logprobs", "time/train_", "pack/", "perf/")
"""Beginnings of names that our own trainer gives already."""


def translate(metrics: dict[str, Any]) -> dict[str, float]:
    """One line of Trinity's metrics."""
    return {_name(key): float(value) for key, value in metrics.items()}


def _name(key: str) -> str:
    return NAMES.get(key) or (key if key.startswith(OURS) else f"trinity/{key}")


def unchanged(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of our own board."""
    return {key: float(value) for key, value in metrics.items()}
