"""The losses and corrections against the formulas of their papers, written out in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ajet.trainer import loss as losses
from ajet.trainer.loss import Correction, CorrectionMode, EdgeTensors, KLType, Level, LossSettings, policy_loss


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


@pytest.mark.parametrize(
    "settings",
    [LossSettings(one) for one in (losses.PPO, losses.GSPO, losses.CISPO, losses.DPPO_TV, losses.DPPO_KL, losses.SAPO)],
)
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


class Ragged:
    """Trajectories of different lengths, spread over packs, in two mini-batches of which the second is off-policy.
    Only trained tokens are edges, as in a pack; some of their entries have weight 0, and one token has two."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = [1, 9, 4, 17, 2, 6, 12, 3]
        self.trajectory = np.repeat(np.arange(len(lengths)), lengths)
        count = len(self.trajectory)
        self.sampler = -rng.exponential(1.0, count)
        self.old = np.minimum(self.sampler + rng.normal(0, 0.2, count), -1e-4)
        drift = rng.normal(0, 0.6, count) + np.array([0, 0, 0, 0, 0.4, -0.6, 0.4, -0.6])[self.trajectory]
        self.new = np.minimum(self.old + np.where(self.trajectory < 4, 0.0, drift), -1e-4)
        self.reference = self.old + rng.normal(0, 0.5, count)
        self.edge = np.append(np.arange(count), 20)
        signs = np.array([1, -1, 1, -1, 1, -1, -1, 1])
        self.advantage = (signs * rng.uniform(0.2, 2, len(lengths)))[self.trajectory][self.edge]
        self.advantage[-1] *= -2.0
        self.weight = rng.uniform(0.01, 0.1, count + 1) * (rng.random(count + 1) > 0.2)
        self.mini_batches = [self.trajectory < 4, self.trajectory >= 4]
        self.pack = rng.integers(0, 3, count)  # a trajectory goes on in other packs

    def gradient(self, settings: LossSettings) -> np.ndarray:
        """d loss / d log π of each token, pack by pack through `policy_loss`."""
        found = np.zeros(len(self.new))
        for part in self.mini_batches:
            for pack in range(3):
                at = np.flatnonzero(part & (self.pack == pack))
                entries = np.flatnonzero(np.isin(self.edge, at))
                new = torch.tensor(self.new[at]).requires_grad_()
                edges = EdgeTensors(
                    sampler_E=torch.tensor(self.sampler[at]),
                    trajectory_E=torch.tensor(self.trajectory[at]),
                    entry_edge_M=torch.tensor(np.searchsorted(at, self.edge[entries])),
                    advantage_M=torch.tensor(self.advantage[entries]),
                    weight_M=torch.tensor(self.weight[entries]),
                    old_E=torch.tensor(self.old[at]),
                    reference_E=torch.tensor(self.reference[at]),
                    drift_T=torch.tensor(self.mean(self.new - self.sampler)),
                )
                loss = policy_loss(new, edges, settings).loss
                found[at] = torch.autograd.grad(loss, new)[0].numpy()
        return found

    def mean(self, value: np.ndarray) -> np.ndarray:
        return np.bincount(self.trajectory, value) / np.bincount(self.trajectory)

    def by_token(self, of_entries: np.ndarray) -> np.ndarray:
        """The entries' weighted values, added up for each token."""
        return np.bincount(self.edge, self.weight * of_entries)


def dppo(case: Ragged, kind: str, low: float, high: float) -> np.ndarray:
    """∂(-M r A) / ∂ log π = -M r A, with r = π / μ."""
    new, mu, advantage = case.new[case.edge], case.sampler[case.edge], case.advantage
    p, q, r = np.exp(new), np.exp(mu), np.exp(new - mu)
    found = np.abs(p - q) if kind == "tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    masked = ((advantage > 0) & (r > 1) & (found > high)) | ((advantage < 0) & (r < 1) & (found > low))
    assert 0 < masked.mean() < 0.9
    return case.by_token(-r * advantage * ~masked)


def sapo(case: Ragged, tau_pos: float, tau_neg: float) -> np.ndarray:
    """∂(-4/τ σ(τ(r-1)) A) / ∂ log π = -4 p (1 - p) r A, with p = σ(τ(r-1))."""
    r = np.exp(case.new - case.old)[case.edge]
    p = 1 / (1 + np.exp(-np.where(case.advantage > 0, tau_pos, tau_neg) * (r - 1)))
    return case.by_token(-4 * p * (1 - p) * r * case.advantage)


def masked_sequences(case: Ragged, delta: float) -> np.ndarray:
    """PPO without clipping, M = 0 where A < 0 and the trajectory's mean log(μ / π) > δ."""
    left_out = (case.advantage < 0) & (case.mean(case.sampler - case.new)[case.trajectory][case.edge] > delta)
    assert 0 < left_out.mean() < 0.9
    return case.by_token(-np.exp(case.new - case.old)[case.edge] * case.advantage * ~left_out)


def corrected_kl(case: Ragged, beta: float) -> np.ndarray:
    """PPO without clipping, and β ∂(w k3) / ∂ log π = β w (k3 + 1 - e^d), with w = π / π_old and d = log π_ref / π."""
    w, d = np.exp(case.new - case.old), case.reference - case.new
    kl = w * (np.exp(d) - d - 1) + w * (1 - np.exp(d))
    return case.by_token(-w[case.edge] * case.advantage + beta * kl[case.edge])


UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e9, "clip_dual": None, "correction": None}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LossSettings(losses.DPPO_TV, 0.1, 0.15), lambda case: dppo(case, "tv", 0.1, 0.15)),
        (LossSettings(losses.DPPO_KL, 0.03, 0.05), lambda case: dppo(case, "kl", 0.03, 0.05)),
        (LossSettings(losses.SAPO, correction=None), lambda case: sapo(case, 1.0, 1.05)),
        (LossSettings(losses.SAPO, tau_pos=2.0, tau_neg=5.0, correction=None), lambda case: sapo(case, 2.0, 5.0)),
        (LossSettings(sequence_mask=0.1, **UNCLIPPED), lambda case: masked_sequences(case, 0.1)),  # type: ignore[arg-type]
        (
            LossSettings(kl_coef=0.3, kl_type=KLType.LOW_VAR_KL_CORRECTED, **UNCLIPPED),  # type: ignore[arg-type]
            lambda case: corrected_kl(case, 0.3),
        ),
    ],
    ids=["dppo_tv", "dppo_kl", "sapo", "sapo with other temperatures", "sequence mask", "corrected kl"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_papers_formula_token_by_token(
    settings: LossSettings, expected: Callable[[Ragged], np.ndarray], seed: int
) -> None:
    case = Ragged(seed)
    found, wanted = case.gradient(settings), expected(case)
    assert np.abs(found - wanted).max() < 1e-9
    assert np.abs(wanted).max() > 0.01


def test_the_corrected_kl_is_unbiased_off_policy() -> None:
    """Over a whole vocabulary, sampled from π_old, its value and its gradient are those of KL(π ‖ π_ref)."""
    generator = torch.Generator().manual_seed(0)
    logits, *others = torch.randn(3, 20, generator=generator, dtype=torch.float64) * 0.6
    old, reference = (other.log_softmax(-1) for other in others)
    logits.requires_grad_()
    log = logits.log_softmax(-1)
    true = (log.exp() * (log - reference)).sum()
    estimate = (old.exp() * losses.divergence(log, reference, KLType.LOW_VAR_KL_CORRECTED, old)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, true)]
    assert torch.allclose(estimate, true, atol=1e-9) and torch.allclose(*gradients, atol=1e-9)


def test_the_divergence_from_the_sampler_is_that_before_the_update() -> None:
    """Later passes over a batch move the policy away from its sampler, and that is no difference between the two."""
    old = torch.tensor([-2.0, -1.0])
    edges = EdgeTensors(
        sampler_E=old + 0.25,
        trajectory_E=torch.tensor([0, 0]),
        entry_edge_M=torch.arange(2),
        advantage_M=torch.tensor([1.0, -1.0]),
        weight_M=torch.tensor([0.5, 0.5]),
        old_E=old,
    )
    for moved in (0.0, 3.0):
        sums = policy_loss(old + moved, edges, LossSettings()).sums
        assert float(sums["sampler_kl/sum"]) == pytest.approx(0.25)
        assert float(sums["sampler_gap/max"]) == pytest.approx(0.25)
