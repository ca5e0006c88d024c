"""Every estimator, baseline and norm against the formulas of its paper, written out with numpy, on random batches.

The batches have ragged turns, one to three agents, rewards of calls that add to or replace the outcome, penalties,
untrained turns, repeated states, groups that teach nothing and episodes cut by their length.
Usage: python benchmarks/credit_truth.py [batches]
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ajet.config.kinds import ESTIMATORS, load
from ajet.trainer.credit import (
    AdvantageEstimator,
    Baseline,
    CreditSettings,
    LossNorm,
    ZeroVariance,
    compute_credit,
    estimators,
)
from support import credit_reference as reference

ALL: list[AdvantageEstimator] = [load(ESTIMATORS, name) for name in ESTIMATORS]

BASELINES = [(Baseline.EPISODE, 1.0), (Baseline.TURN, 1.0), (Baseline.TURN, 0.9), (Baseline.STATE, 0.9)]
STATE_WEIGHT, PASS_K, LENGTH = 0.7, 3, 50.0
MOST = 1e-9
"""Differences are of rounding: the same sums, added in another order."""


def compare_advantages(estimator: AdvantageEstimator, baseline: Baseline, gamma: float, batches: int) -> dict[str, Any]:
    settings = CreditSettings(
        estimator=estimator,
        baseline=baseline,
        gamma=gamma,
        state_weight=STATE_WEIGHT,
        pass_k=PASS_K,
        zero_variance=ZeroVariance.KEEP,
    )
    difference, calls = 0.0, 0
    for seed in range(batches):
        batch = reference.random_batch(np.random.default_rng(seed))
        credit = compute_credit([[e.summary("e") for e in group] for group in batch], settings)
        want = reference.advantages(batch, estimator.name, baseline, gamma=gamma, omega=STATE_WEIGHT, k=PASS_K)
        for group, rows in zip(credit.groups, want, strict=True):
            for episode, row in zip(group, rows, strict=True):
                for call, value in zip(episode.calls, row, strict=True):
                    if call.entries:
                        calls += 1
                        difference = max(difference, abs(call.advantage - value))
    return {"estimator": estimator, "baseline": baseline, "gamma": gamma, "calls": calls, "difference": difference}


def compare_weights(norm: LossNorm, multiplicity: bool, batches: int) -> dict[str, Any]:
    """Relative differences of the weights of all entries, with skipped groups and masked episodes."""
    settings = CreditSettings(loss_norm=norm, multiplicity=multiplicity, dr_grpo_length=LENGTH, mask_overlong=True)
    difference, entries = 0.0, 0
    for seed in range(batches):
        batch = reference.random_batch(np.random.default_rng(seed))
        credit = compute_credit([[e.summary("e") for e in group] for group in batch], settings)
        expected = reference.entries(batch, norm, multiplicity=multiplicity, length=LENGTH)
        for call, want in zip([call for e in credit.episodes for call in e.calls], expected, strict=True):
            for (advantage, weight), (right, share) in zip(call.entries, want, strict=True):
                entries += 1
                difference = max(difference, abs(advantage - right), abs(weight / share - 1.0))
    return {"loss_norm": norm, "multiplicity": multiplicity, "entries": entries, "difference": difference}


def main() -> None:
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    advantages = [
        compare_advantages(estimator, baseline, gamma, batches)
        for estimator, (baseline, gamma) in product(ALL, BASELINES)
        if estimator is not estimators.PASS_AT_K or baseline is Baseline.EPISODE
    ]
    weights = [compare_weights(norm, multiplicity, batches) for norm, multiplicity in product(LossNorm, (False, True))]
    for row in advantages + weights:
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
    if wrong := [row for row in advantages + weights if not row["difference"] < MOST]:
        raise SystemExit(f"not the formula: {wrong}")
    write_result("credit_truth", {"batches": batches, "advantages": advantages, "weights": weights})


if __name__ == "__main__":
    main()
