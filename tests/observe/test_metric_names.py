"""verl's, Trinity's and our own metrics under shared names."""

from __future__ import annotations

from ajet.observe.metric_names import from_trinity, from_verl, step_names


def test_verls_metrics_get_our_names() -> None:
    given = {"actor/grad_norm": 0.5, "timing_s/gen": 2, "reward/mean": 0.25, "critic/score/mean": 9.0, "note": "text"}
    assert from_verl(given) == {
        "train/grad_norm": 0.5,
        "time/rollout": 2.0,
        "reward/mean": 0.25,
        "verl/critic/score/mean": 9.0,
    }


def test_trinitys_metrics_get_our_names() -> None:
    given = {"actor/grad_norm": 0.5, "time/train_step": 2.0, "pack/rows": 3.0, "rollout/x": 9.0}
    assert from_trinity(given) == {
        "train/grad_norm": 0.5,
        "time/train": 2.0,
        "pack/rows": 3.0,
        "trinity/rollout/x": 9.0,
    }


def test_a_step_adds_the_shared_names() -> None:
    given = {"reward/mean": 0.5, "loss/total": 2.0, "pack/rows": 3.0}
    assert step_names(given) == {"train/reward/mean": 0.5, "train/loss": 2.0}
