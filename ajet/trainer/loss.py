"""The loss of trained tokens, its divergence from a reference, and the correction for another sampler: one formula
for every layout, over edges rather than rows or trees.

The loss is the sum over entries of weight x token loss (weights: `ajet.trainer.credit`), so the losses
of several packs add up, and so do their gradients.

Shapes: E edges, M entries, T trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Log ratios count as at most this: exp of a long trajectory's sum would overflow."""


class CorrectionMode(StrEnum):
    """What the ratio does to the weight."""

    TOKEN_TIS = "token_tis"
    """min(ratio of the token, cap)."""
    SEQUENCE_TIS = "sequence_tis"
    """min(ratio of the trajectory, cap)."""
    MASKED = "masked"
    """The ratio itself within [low, high], and 0 outside."""


class Level(StrEnum):
    """Whose ratio `masked` looks at."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Correction:
    """A mode with its bounds."""

    mode: CorrectionMode = CorrectionMode.TOKEN_TIS
    cap: float = 2.0
    level: Level = Level.TOKEN
    low: float = 0.5
    high: float = 5.0

    @property
    def by_trajectory(self) -> bool:
        """Whether it needs the whole trajectory, which may be spread over several packs."""
        return self.mode is CorrectionMode.SEQUENCE_TIS or (
            self.mode is CorrectionMode.MASKED and self.level is Level.SEQUENCE
        )

    def factors(self, log_ratio_E: Tensor, trajectory_E: Tensor, log_ratio_T: Tensor | None) -> Tensor:
        """The factor of each edge. `log_ratio_T`: each trajectory's sum; None if all are whole among these edges."""
        if self.by_trajectory:
            if log_ratio_T is None:
                count = int(trajectory_E.max()) + 1
                log_ratio_T = log_ratio_E.new_zeros(count).index_add_(0, trajectory_E, log_ratio_E)
            log_ratio_E = log_ratio_T[trajectory_E]
        ratio_E = log_ratio_E.clamp(max=MOST_LOG_RATIO).exp()
        if self.mode is not CorrectionMode.MASKED:
            return ratio_E.clamp(max=self.cap)
        kept_E = (ratio_E >= self.low) & (ratio_E <= self.high)
        return torch.where(kept_E, ratio_E, torch.zeros_like(ratio_E))


class KLType(StrEnum):
    """Estimators of KL(policy, reference), with d = log reference - log policy at the sampled token.

    Their values and their gradients are two things: of the plain three, only the gradient of `k2` has the gradient of
    the divergence as its mean. A name that ends in `+` has that gradient, and the value of the name before it.
    """

    K1 = "k1"
    """-d: unbiased, may be negative. The mean of its gradient is zero."""
    K2 = "k2"
    """d²/2: biased, low variance. The mean of its gradient is the divergence's."""
    LOW_VAR_KL = "low_var_kl"
    """exp(d) - d - 1 (k3): unbiased, never negative; d is clamped to ±20, the result to ±10. The mean of its gradient
    is that of the reversed divergence, KL(reference, policy)."""
    K1_PLUS = "k1+"
    """The value of k1, the gradient of k2."""
    LOW_VAR_KL_PLUS = "low_var_kl+"
    """The value of k3, the gradient of k2."""


def divergence(new_E: Tensor, reference_E: Tensor, kind: KLType) -> Tensor:
    """An estimate at each sampled token."""
    d_E = reference_E - new_E
    if kind is KLType.K1:
        return -d_E
    if kind is KLType.K2:
        return 0.5 * d_E.square()
    if kind is KLType.LOW_VAR_KL:
        d_E = d_E.clamp(-20.0, 20.0)
        return (d_E.exp() - d_E - 1.0).clamp(-10.0, 10.0)
    plain = KLType.K1 if kind is KLType.K1_PLUS else KLType.LOW_VAR_KL
    slope_E = divergence(new_E, reference_E, KLType.K2)
    return slope_E - slope_E.detach() + divergence(new_E, reference_E, plain).detach()


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient that rises while the divergence is above its target, and falls while it is below."""

    target: float
    """Divergence per token to be held, in nats."""
    horizon: float = 10.0
    """Steps in which the coefficient can change by about a fifth: each step changes it by at most 0.2 / horizon."""

    def next(self, coefficient: float, measured: float) -> float:
        """The coefficient of the next step. A divergence that is not a number says nothing."""
        if math.isnan(measured):
            return coefficient
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error / self.horizon)


TokenLoss = Callable[[Tensor, Tensor, Tensor, "LossSettings"], tuple[Tensor, Tensor]]
"""Computes the loss of each entry from its ratio, new logprob and advantage, and 1.0 where clipping acts."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of a token."""

    name: str
    token_loss: TokenLoss | None
    """None: log-likelihood only; advantages are ignored."""
    by_trajectory: bool = False
    """The ratio is that of the whole trajectory: exp of the mean log ratio of its tokens."""

    def __str__(self) -> str:
        return self.name

    @property
    def imitates(self) -> bool:
        """Whether tokens are imitated, whatever their advantage."""
        return self.token_loss is None


def _cispo(ratio_M: Tensor, new_M: Tensor, advantage_M: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    bound = 1.0 + settings.clip_high
    fixed_M = ratio_M.detach().clamp(max=bound)
    return -fixed_M * advantage_M * new_M, (ratio_M.detach() > bound).to(new_M.dtype)


def _clipped(ratio_M: Tensor, new_M: Tensor, advantage_M: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    plain_M = ratio_M * advantage_M
    clipped_M = ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_M
    gain_M = torch.minimum(plain_M, clipped_M)
    acts_M = clipped_M < plain_M
    if settings.clip_dual is not None:
        least_M = settings.clip_dual * advantage_M
        beyond_M = (advantage_M < 0) & (gain_M < least_M)
        gain_M = torch.where(beyond_M, least_M, gain_M)
        acts_M = acts_M | beyond_M
    return -gain_M, acts_M.detach().to(new_M.dtype)


PPO = PolicyLoss("ppo", _clipped)
"""Clipped ratio of each token, with a higher upper bound (clip-higher)."""
GSPO = PolicyLoss("gspo", _clipped, by_trajectory=True)
"""The same with the ratio of the whole trajectory."""
CISPO = PolicyLoss("cispo", _cispo)
"""Log-likelihood, weighted with the clipped, detached ratio: clipping never zeroes a token's gradient."""
SFT = PolicyLoss("sft", None)
"""Log-likelihood only."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The loss and its terms."""

    policy_loss: PolicyLoss = PPO
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = 3.0
    """PPO and GSPO: with an advantage A < 0 the loss is at most -clip_dual x A, with gradient 0 beyond. None: off."""
    kl_coef: float = 0.0
    kl_type: KLType = KLType.LOW_VAR_KL_PLUS
    entropy_coef: float = 0.0
    correction: Correction | None = field(default_factory=Correction)
    """For a sampler that differs from the trainer. None: off."""
    distillation_coef: float = 1.0
    """Weight of a teacher's advantage, where there is a teacher."""


@dataclass(slots=True)
class EdgeTensors:
    """A pack's edges as tensors, apart from the current policy's logprobs."""

    sampler_E: Tensor
    trajectory_E: Tensor
    entry_edge_M: Tensor
    advantage_M: Tensor
    weight_M: Tensor
    old_E: Tensor | None = None
    """π_old from the trainer's own forward pass. None: the current policy, detached (one update per batch)."""
    reference_E: Tensor | None = None
    teacher_E: Tensor | None = None
    """A teacher's logprobs. Its advantage, log teacher - log π_old, is added to that of each token."""
    log_ratio_T: Tensor | None = None
    """GSPO: mean log ratio π / π_old of each trajectory. None: every trajectory is whole within the pack."""
    sampler_log_ratio_T: Tensor | None = None
    """Corrections by trajectory: the sum of log π_old / π_sampler of each. None: as above."""


@dataclass(slots=True)
class LossResult:
    """The loss to differentiate, and weighted sums for logs (detached)."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Keys ending in `/sum` are sums of weight x value, which add up over packs; those in `/max` are maxima."""


def policy_loss(
    new_E: Tensor, edges: EdgeTensors, settings: LossSettings, entropy_E: Tensor | None = None
) -> LossResult:
    """The loss of one pack's edges."""
    at = edges.entry_edge_M
    old_E = edges.old_E if edges.old_E is not None else new_E.detach()
    weight_M = edges.weight_M
    result = LossResult(new_E.sum() * 0.0)
    note = _WeightedSums(result.sums, weight_M)
    token_loss = settings.policy_loss.token_loss
    if token_loss is None:
        token_M = -new_E[at]
    else:
        if settings.correction is not None:
            gap_E = (old_E - edges.sampler_E).detach()
            correction_M = settings.correction.factors(gap_E, edges.trajectory_E, edges.sampler_log_ratio_T)[at]
            note("correction", correction_M)
            note("correction_masked", (correction_M == 0).to(new_E.dtype))
            weight_M = weight_M * correction_M
        result.sums["sampler_gap/max"] = (old_E.detach() - edges.sampler_E).abs().max()
        note("sampler_kl", (edges.sampler_E - new_E.detach())[at])
        log_ratio_E = new_E - old_E
        if settings.policy_loss.by_trajectory:
            log_ratio_E = _trajectory_log_ratio(log_ratio_E, edges) + new_E - new_E.detach()
        ratio_M = log_ratio_E.clamp(max=MOST_LOG_RATIO).exp()[at]
        advantage_M = edges.advantage_M
        if edges.teacher_E is not None:
            taught_M = (edges.teacher_E - old_E).detach()[at]
            note("teacher_kl", -taught_M)
            advantage_M = advantage_M + settings.distillation_coef * taught_M
        token_M, clipped_M = token_loss(ratio_M, new_E[at], advantage_M, settings)
        note("clip_fraction", clipped_M)
        note("ratio", ratio_M.detach())
        result.sums["ratio/max"] = ratio_M.detach().max()
    note("policy", token_M.detach())
    result.loss = result.loss + (weight_M * token_M).sum()
    if edges.reference_E is not None and not settings.policy_loss.imitates:
        kl_M = divergence(new_E, edges.reference_E, settings.kl_type)[at]
        note("kl", kl_M.detach())
        result.loss = result.loss + settings.kl_coef * (edges.weight_M * kl_M).sum()
    if entropy_E is not None:
        note("entropy", entropy_E.detach()[at])
        if settings.entropy_coef and not settings.policy_loss.imitates:
            result.loss = result.loss - settings.entropy_coef * (edges.weight_M * entropy_E[at]).sum()
    result.sums["total/sum"] = result.loss.detach()
    return result


def trajectory_sums(value_E: Tensor, trajectory_E: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sum and the number of edges of each trajectory."""
    sums = value_E.new_zeros(count).index_add_(0, trajectory_E, value_E)
    numbers = value_E.new_zeros(count).index_add_(0, trajectory_E, torch.ones_like(value_E))
    return sums, numbers


def _trajectory_log_ratio(log_ratio_E: Tensor, edges: EdgeTensors) -> Tensor:
    """The mean log ratio of each edge's trajectory, detached."""
    mean_T = edges.log_ratio_T
    if mean_T is None:
        count = int(edges.trajectory_E.max()) + 1
        sums, numbers = trajectory_sums(log_ratio_E.detach(), edges.trajectory_E, count)
        mean_T = sums / numbers.clamp(min=1)
    return mean_T[edges.trajectory_E]


class _WeightedSums:
    """Writes weighted sums into `sums`."""

    def __init__(self, sums: dict[str, Tensor], weight_M: Tensor) -> None:
        self._sums = sums
        self._weight_M = weight_M
        sums["weight/sum"] = weight_M.sum()

    def __call__(self, name: str, value_M: Tensor) -> None:
        self._sums[f"{name}/sum"] = (self._weight_M * value_M).sum()
