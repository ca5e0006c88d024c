"""The losses and corrections against the formulas of their papers, written out in numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ajet.trainer import loss as losses
from ajet.trainer.loss import Correction, CorrectionMode, EdgeTensors, Level, LossSettings, policy_loss


def token_gradients(
    log_ratios: list[float],
    advantages: list[float],
    settings: LossSettings,
    *,
    trajectory: list[int] | None = None,
    sampler_gaps: list[float] | None = None,
    weights: list[float] | None = None,
    taught: list[float] | None = None,
) -> np.ndarray:
    """d loss / d log π of each token. `log_ratios`: log π / π_old; `sampler_gaps`: log π_old / π_sampler; `taught`:
    log π_teacher / π_old."""
    count = len(log_ratios)
    old = torch.full((count,), -2.0, dtype=torch.float64)
    new = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    edges = EdgeTensors(
        sampler_E=old - torch.tensor(sampler_gaps or [0.0] * count, dtype=torch.float64),
        trajectory_E=torch.tensor(trajectory or [0] * count),
        entry_edge_M=torch.arange(count),
        advantage_M=torch.tensor(advantages, dtype=torch.float64),
        weight_M=torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        old_E=old,
        teacher_E=None if taught is None else old + torch.tensor(taught, dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(policy_loss(new, edges, settings).loss, new)
    found: np.ndarray = gradient.numpy()
    return found


def test_a_token_that_became_far_likelier_and_is_punished_has_a_bounded_gradient() -> None:
    plain, dual = LossSettings(clip_dual=None), LossSettings()
    assert token_gradients([7.0], [-1.0], plain)[0] == pytest.approx(math.exp(7.0))  # 1097
    assert token_gradients([7.0], [-1.0], dual)[0] == 0.0
    assert token_gradients([math.log(2.9)], [-1.0], dual)[0] == pytest.approx(2.9)
    assert token_gradients([math.log(3.1)], [-1.0], dual)[0] == 0.0
    # beside it, clipping is what it was: below 1 - 0.2 with a negative advantage, above 1 + 0.28 with a positive one
    assert token_gradients([-1.0, 1.0, 0.1, -1.0], [-1.0, 1.0, 1.0, 1.0], dual) == pytest.approx(
        [0.0, 0.0, -math.exp(0.1), -math.exp(-1.0)]
    )


def test_the_dual_clip_bounds_the_ratio_of_a_trajectory_too() -> None:
    settings = LossSettings(losses.GSPO)
    assert token_gradients([7.0, 6.0], [-1.0, -1.0], settings) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("settings", [LossSettings(), LossSettings(losses.GSPO), LossSettings(losses.CISPO)])
def test_even_an_overflowing_ratio_leaves_the_gradient_finite(settings: LossSettings) -> None:
    assert np.isfinite(token_gradients([1000.0, -1000.0], [-1.0, 1.0], settings)).all()


def test_gspo_is_the_papers_objective() -> None:
    """J = 1/G Σ_i min(s_i A_i, clip(s_i) A_i) with s_i = exp(1/|y_i| Σ_t log ratio): sequence-mean weights."""
    rng = np.random.default_rng(0)
    lengths, advantages = [3, 7, 4], [1.0, -0.5, 0.7]
    log_ratios = rng.normal(0, 3e-4, sum(lengths))
    trajectory = np.repeat(np.arange(3), lengths)
    low, high = 3e-4, 4e-4
    expected = np.zeros(sum(lengths))
    for i, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        s = math.exp(log_ratios[trajectory == i].mean())
        clipped = min(max(s, 1 - low), 1 + high)
        if s * advantage <= clipped * advantage:  # else the minimum is the constant one
            expected[trajectory == i] = -(1 / 3) * advantage * s / length
    got = token_gradients(
        log_ratios.tolist(),
        [advantages[i] for i in trajectory],
        LossSettings(losses.GSPO, clip_low=low, clip_high=high),
        trajectory=trajectory.tolist(),
        weights=[1 / (3 * lengths[i]) for i in trajectory],
    )
    assert got == pytest.approx(expected, rel=1e-9)


GAPS = [0.1, -0.3, 1.2, 0.5, -2.0, 0.05]
TRAJECTORY = [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(), [min(math.exp(g), 2.0) for g in GAPS]),
        (
            Correction(CorrectionMode.SEQUENCE_TIS),
            [2.0, 2.0, 2.0, math.exp(-1.5), math.exp(-1.5), math.exp(0.05)],
        ),
        (
            Correction(CorrectionMode.MASKED, high=3.0),
            [math.exp(0.1), math.exp(-0.3), 0.0, math.exp(0.5), 0.0, math.exp(0.05)],
        ),
        (
            Correction(CorrectionMode.MASKED, level=Level.SEQUENCE, high=3.0),
            [math.exp(1.0)] * 3 + [0.0, 0.0] + [math.exp(0.05)],
        ),
        (None, [1.0] * 6),
    ],
    ids=["token_tis", "sequence_tis", "masked_tokens", "masked_sequences", "none"],
)
def test_corrections_multiply_the_gradient_by_their_factor(
    correction: Correction | None, expected: list[float]
) -> None:
    got = token_gradients(
        [0.0] * 6,
        [-1.0] * 6,
        LossSettings(correction=correction),
        trajectory=TRAJECTORY,
        sampler_gaps=GAPS,
    )
    assert got == pytest.approx(expected)


def test_a_teachers_opinion_is_added_to_the_advantage() -> None:
    for loss in (losses.PPO, losses.GSPO, losses.CISPO):
        got = token_gradients([0.0, 0.0], [0.5, 0.0], LossSettings(loss, distillation_coef=2.0), taught=[0.3, -1.0])
        assert got == pytest.approx([-(0.5 + 0.6), 2.0])


def test_distillation_descends_the_reverse_divergence() -> None:
    """Over a whole vocabulary, weighted with the policy's own probabilities, the gradient is that of KL(π, teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    log = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((log.exp() * (log - teacher)).sum(), logits, retain_graph=True)
    edges = EdgeTensors(
        sampler_E=log.detach(),
        trajectory_E=torch.arange(20),
        entry_edge_M=torch.arange(20),
        advantage_M=torch.zeros(20, dtype=torch.float64),
        weight_M=log.detach().exp(),
        teacher_E=teacher,
    )
    (got,) = torch.autograd.grad(policy_loss(log, edges, LossSettings()).loss, logits)
    assert torch.allclose(got, true, atol=1e-12)
