"""The estimators of the divergence: their means and the means of their gradients, over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ajet.trainer.loss import AdaptiveKL, KLType, divergence

VOCAB = 50


def policies(seed: int, distance: float = 0.5) -> tuple[Tensor, Tensor]:
    """Logits of a policy, to be differentiated, and log-probabilities of its reference. At a `distance` of 0.5 no
    estimate reaches the bounds of k3."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    policy = reference + distance * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference.log_softmax(-1)


def true_divergence(policy: Tensor, reference: Tensor) -> Tensor:
    log = policy.log_softmax(-1)
    return (log.exp() * (log - reference)).sum()


def expected(kind: KLType, policy: Tensor, reference: Tensor) -> Tensor:
    """The estimator's mean over sampled tokens, whose choice is not differentiated, as in training."""
    log = policy.log_softmax(-1)
    return (log.detach().exp() * divergence(log, reference, kind)).sum()


def cosine_with_truth(kind: KLType, seed: int) -> float:
    policy, reference = policies(seed, distance=1.0)
    (true,) = torch.autograd.grad(true_divergence(policy, reference), policy)
    (mean,) = torch.autograd.grad(expected(kind, policy, reference), policy)
    return float(torch.cosine_similarity(mean, true, dim=0))


@pytest.mark.parametrize("kind", [KLType.K2, KLType.K1_PLUS, KLType.LOW_VAR_KL_PLUS])
def test_the_gradient_is_the_divergences_own(kind: KLType) -> None:
    for seed in range(5):
        policy, reference = policies(seed)
        (true,) = torch.autograd.grad(true_divergence(policy, reference), policy)
        (mean,) = torch.autograd.grad(expected(kind, policy, reference), policy)
        assert torch.allclose(mean, true, atol=1e-12)


def test_the_plain_gradients_of_k1_and_k3_are_not() -> None:
    policy, reference = policies(0)
    (nothing,) = torch.autograd.grad(expected(KLType.K1, policy, reference), policy)
    assert float(nothing.abs().max()) < 1e-12
    assert all(cosine_with_truth(KLType.LOW_VAR_KL, seed) < 0.95 for seed in range(5))
    # what k3's gradient descends is the divergence the other way round
    (mean,) = torch.autograd.grad(expected(KLType.LOW_VAR_KL, policy, reference), policy)
    (reverse,) = torch.autograd.grad((reference.exp() * (reference - policy.log_softmax(-1))).sum(), policy)
    assert torch.allclose(mean, reverse, atol=1e-12)


@pytest.mark.parametrize("kind", [KLType.K1, KLType.LOW_VAR_KL, KLType.K1_PLUS, KLType.LOW_VAR_KL_PLUS])
def test_the_value_is_unbiased(kind: KLType) -> None:
    policy, reference = policies(1)
    with torch.no_grad():
        mean, true = expected(kind, policy, reference), true_divergence(policy, reference)
    assert float(mean) == pytest.approx(float(true))


def test_a_plus_changes_the_gradient_alone() -> None:
    policy, reference = policies(2)
    log = policy.log_softmax(-1)
    for plain, plus in ((KLType.K1, KLType.K1_PLUS), (KLType.LOW_VAR_KL, KLType.LOW_VAR_KL_PLUS)):
        assert torch.allclose(divergence(log, reference, plain), divergence(log, reference, plus))


def test_the_adaptive_coefficient_follows_its_target() -> None:
    """β ← β (1 + K e) with e = clip(KL / target - 1, ±0.2) and K = 1 / horizon."""
    adaptive = AdaptiveKL(target=0.1, horizon=10.0)
    assert adaptive.next(0.5, 0.1) == 0.5
    assert adaptive.next(0.5, 0.11) == pytest.approx(0.5 * 1.01)
    assert adaptive.next(0.5, 9.0) == pytest.approx(0.5 * 1.02)
    assert adaptive.next(0.5, 0.0) == pytest.approx(0.5 * 0.98)


def test_a_divergence_that_is_no_number_leaves_the_adaptive_coefficient() -> None:
    """The weights of such a step are unchanged; the steps after it must still count."""
    assert AdaptiveKL(target=0.1, horizon=10.0).next(0.5, float("nan")) == 0.5
