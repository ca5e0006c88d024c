"""Every estimator, baseline and norm against the formulas of `credit_reference.py`, on random batches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

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
from ajet.trainer.credit.estimators import pass_at_k_advantages
from support import credit_reference as reference

ALL: list[AdvantageEstimator] = [load(ESTIMATORS, name) for name in ESTIMATORS]

COMBINATIONS = [
    (estimator, baseline, gamma)
    for estimator, (baseline, gamma) in product(
        ALL,
        [(Baseline.EPISODE, 1.0), (Baseline.TURN, 1.0), (Baseline.TURN, 0.9), (Baseline.STATE, 0.9)],
    )
    if estimator is not estimators.PASS_AT_K or baseline is Baseline.EPISODE
]


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "baseline", "gamma"), COMBINATIONS)
def test_advantages_are_the_formula_s(estimator: AdvantageEstimator, baseline: Baseline, gamma: float) -> None:
    settings = CreditSettings(
        estimator=estimator,
        baseline=baseline,
        gamma=gamma,
        zero_variance=ZeroVariance.KEEP,
        state_weight=0.7,
        pass_k=3,
    )
    for seed in range(10):
        batch = reference.random_batch(np.random.default_rng(seed))
        credit = compute_credit([[e.summary("e") for e in group] for group in batch], settings)
        expected = reference.advantages(batch, estimator.name, baseline, gamma=gamma, omega=0.7, k=3)
        for group, got, want in zip(batch, credit.groups, expected, strict=True):
            for played, episode, row in zip(group, got, want, strict=True):
                for turn, call, value in zip(played.turns, episode.calls, row, strict=True):
                    assert bool(call.entries) == (turn.tokens > 0)
                    if turn.tokens:
                        assert call.advantage == pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("norm", "multiplicity"), list(product(LossNorm, (False, True))))
def test_entries_are_the_formula_s_with_skipped_and_masked_episodes(norm: LossNorm, multiplicity: bool) -> None:
    settings = CreditSettings(loss_norm=norm, multiplicity=multiplicity, dr_grpo_length=50.0, mask_overlong=True)
    for seed in range(10):
        batch = reference.random_batch(np.random.default_rng(seed))
        credit = compute_credit([[e.summary("e") for e in group] for group in batch], settings)
        expected = reference.entries(batch, norm, multiplicity=multiplicity, length=50.0)
        assert sum(map(bool, expected)) > 20
        for call, want in zip([call for e in credit.episodes for call in e.calls], expected, strict=True):
            assert np.array(call.entries) == pytest.approx(np.array(want))


@pytest.mark.parametrize(("k", "wins"), [(k, wins) for k in (1, 2, 3, 5) for wins in range(7)])
def test_pass_at_k_is_the_mean_over_all_subsets(k: int, wins: int) -> None:
    successes = [index < wins for index in range(6)]
    assert pass_at_k_advantages(successes, k) == pytest.approx(reference.pass_at_k(successes, k))


def test_pass_at_k_has_nothing_to_compare_in_a_group_that_shrank_to_k() -> None:
    assert pass_at_k_advantages([True, False], 4) == [0.0, 0.0]


def test_pass_at_k_takes_the_judge_s_word_for_success() -> None:
    batch = [[reference.Played([reference.Turn("a", 1)], 0.4) for _ in range(4)]]
    summaries = [[played.summary("e") for played in batch[0]]]
    summaries[0][0].success = True
    settings = CreditSettings(estimator=estimators.PASS_AT_K, pass_k=2)
    got = [call.advantage for episode in compute_credit(summaries, settings).episodes for call in episode.calls]
    assert got == pytest.approx(reference.pass_at_k([True, False, False, False], 2))
    lower = CreditSettings(estimator=estimators.PASS_AT_K, pass_k=2, success_threshold=0.3)
    summaries[0][0].success = None
    assert compute_credit(summaries, lower).zero_variance_groups == 1
