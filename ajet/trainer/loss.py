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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Log ratios count as at most this: exp of a long trajectory's sum would overflow."""
SMALLEST_REST = 1e-6
"""The probability that is left to the other tokens, in `binary_kl`, is at least about this."""


class CorrectionMode(StrEnum):
    """What the ratio does to the weight."""

    TOKEN_TIS = "token_tis"
    """min(ratio of the token, cap)."""
    SEQUENCE_TIS = "sequence_tis"
    """min(ratio of the trajectory, cap)."""
    MASKED = "masked"
    """The ratio itself within [low, high], and 0 outside."""


class Level(StrEnum):
    """Whether `masked` looks at the ratio of a token or of its sequence."""

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
                log_ratio_T, _ = trajectory_sums(log_ratio_E, trajectory_E, int(trajectory_E.max()) + 1)
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
    LOW_VAR_KL_CORRECTED = "low_var_kl_corrected"
    """π / π_old x k3, the ratio differentiated, too: unbiased, with its gradient, also where π has left π_old
    (DeepSeek-V3.2, 2512.02556, section 3.1). Its gradient is π / π_old x that of k2, and is computed so: clamping
    an overflowing k3 would turn the gradient round."""


def divergence(new_E: Tensor, reference_E: Tensor, kind: KLType, old_E: Tensor | None = None) -> Tensor:
    """An estimate at each sampled token. `old_E`: π_old, for `LOW_VAR_KL_CORRECTED`; None: the current policy."""
    if kind is KLType.LOW_VAR_KL_CORRECTED:
        plain_E = divergence(new_E, reference_E, KLType.LOW_VAR_KL_PLUS)
        if old_E is None:
            return plain_E
        return (new_E - old_E).detach().clamp(max=MOST_LOG_RATIO).exp() * plain_E
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


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a policy loss sees: M trained tokens of one pack or micro-batch, in no order. Each tensor's shape is (M,).

    A token that counts for several leaves of its tree occurs once for each of them. Weights aren't here: the norm of
    the batch (`loss_norm`) is applied to what the loss returns.
    """

    new: Tensor
    """log π of the policy in training. It carries the gradient."""
    old: Tensor
    """log π_old of the policy before the step's first update. Constant."""
    sampler: Tensor
    """log π_sampler, as the engine recorded it. Constant."""
    ratio: Tensor
    """π / π_old with the gradient of π; of the whole trajectory with `PolicyLoss.by_trajectory`."""
    advantage: Tensor
    """That of the token's call, with the teacher's opinion of the token if there is a teacher."""
    trajectory: Tensor
    """Which trajectory the token belongs to. A trajectory may go on in other packs and micro-batches."""
    settings: LossSettings
    """`clip_low`, `clip_high`, `clip_dual`, `tau_pos`, `tau_neg` as configured."""


class TokenLoss(NamedTuple):
    """The loss of each token, and where its clipping or mask acts, for the metric `clip_fraction`."""

    loss: Tensor
    clipped: Tensor


LossFunction = Callable[[LossTokens], TokenLoss | Tensor]
"""A policy loss: the loss of each token, shape (M,), alone or with where clipping acts."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss function with what it needs to be known of it. A bare function stands for one with the defaults."""

    name: str
    function: LossFunction
    by_trajectory: bool = False
    """`ratio` is that of the whole trajectory: exp of the mean log ratio of its tokens."""
    to_sampler: bool = False
    """`ratio` is to the policy that sampled instead of π_old. `rollout_correction` is then left out: it is in it."""
    imitates: bool = False
    """Tokens are imitated, whatever their advantage: no KL term, no entropy, no correction."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, tokens: LossTokens) -> TokenLoss:
        found = self.function(tokens)
        return found if isinstance(found, TokenLoss) else TokenLoss(found, torch.zeros_like(found))


def clipped_loss(tokens: LossTokens) -> TokenLoss:
    """PPO's: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with A < 0 at most -clip_dual A."""
    settings, advantage = tokens.settings, tokens.advantage
    plain = tokens.ratio * advantage
    clipped = tokens.ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage
    gain = torch.minimum(plain, clipped)
    acts = clipped < plain
    if settings.clip_dual is not None:
        least = settings.clip_dual * advantage
        beyond = (advantage < 0) & (gain < least)
        gain = torch.where(beyond, least, gain)
        acts = acts | beyond
    return TokenLoss(-gain, acts)


def cispo_loss(tokens: LossTokens) -> TokenLoss:
    """CISPO's: -min(r, 1 + clip_high) A log π, with a constant first factor."""
    bound = 1.0 + tokens.settings.clip_high
    ratio = tokens.ratio.detach()
    return TokenLoss(-ratio.clamp(max=bound) * tokens.advantage * tokens.new, ratio > bound)


def dppo_loss(tokens: LossTokens, divergence_of: Callable[[Tensor, Tensor], Tensor]) -> TokenLoss:
    """DPPO's (Qi et al. 2026, *Rethinking the Trust Region in LLM Reinforcement Learning*, 2602.04879): -M r A.

    r = π / π_sampler. M is 0 where the update would lead out of the trust region: A > 0, r > 1 and D > clip_high, or
    A < 0, r < 1 and D > clip_low, with D a divergence of the two policies at this token. It is 1 elsewhere. Published
    scripts also truncate r, at bounds from 5 to 10,000; here it is only kept from overflowing.
    """
    found = divergence_of(tokens.new.detach(), tokens.sampler)
    up = (tokens.advantage > 0) & (tokens.ratio > 1) & (found > tokens.settings.clip_high)
    down = (tokens.advantage < 0) & (tokens.ratio < 1) & (found > tokens.settings.clip_low)
    return TokenLoss(-tokens.ratio * tokens.advantage * ~(up | down), up | down)


def binary_tv(new: Tensor, sampler: Tensor) -> Tensor:
    """|π - π_sampler|: the total variation of "this token, or another"."""
    return (new.exp() - sampler.exp()).abs()


def binary_kl(new: Tensor, sampler: Tensor) -> Tensor:
    """KL(π_sampler ‖ π) of "this token, or another". A token that was or is certain counts as almost certain."""
    new, sampler = (log.clamp(max=-SMALLEST_REST) for log in (new, sampler))
    rest_new, rest_sampler = (torch.log(-torch.expm1(log)) for log in (new, sampler))
    return sampler.exp() * (sampler - new) - torch.expm1(sampler) * (rest_sampler - rest_new)


def sapo_loss(tokens: LossTokens) -> Tensor:
    """SAPO's (Gao et al. 2025, *Soft Adaptive Policy Optimization*, 2511.20347): -(4 / τ) σ(τ (r - 1)) A.

    τ is tau_pos where A > 0, else tau_neg. At r = 1 the gradient is that without clipping; it fades as r leaves 1.
    """
    settings = tokens.settings
    tau = torch.full_like(tokens.ratio, settings.tau_neg).masked_fill(tokens.advantage > 0, settings.tau_pos)
    return -(4.0 / tau) * torch.sigmoid(tau * (tokens.ratio - 1.0)) * tokens.advantage


def imitation_loss(tokens: LossTokens) -> Tensor:
    """-log π."""
    return -tokens.new


PPO = PolicyLoss("ppo", clipped_loss)
"""Clipped ratio of each token, with a higher upper bound (clip-higher)."""
GSPO = PolicyLoss("gspo", clipped_loss, by_trajectory=True)
"""The same with the ratio of the whole trajectory."""
CISPO = PolicyLoss("cispo", cispo_loss)
"""Log-likelihood, weighted with the clipped, detached ratio: clipping never zeroes a token's gradient."""
DPPO_TV = PolicyLoss("dppo_tv", partial(dppo_loss, divergence_of=binary_tv), to_sampler=True)
"""Ratio to the sampler; a token is left out where its probability changed too much, whatever its ratio."""
DPPO_KL = PolicyLoss("dppo_kl", partial(dppo_loss, divergence_of=binary_kl), to_sampler=True)
"""The same with a divergence in nats."""
SAPO = PolicyLoss("sapo", sapo_loss)
"""A smooth gate of the ratio in place of clipping."""
SFT = PolicyLoss("sft", imitation_loss, imitates=True)
"""Log-likelihood only."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The loss and its terms."""

    policy_loss: PolicyLoss = PPO
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = 3.0
    """PPO and GSPO: with an advantage A < 0 the loss is at most -clip_dual x A, with gradient 0 beyond. None: off."""
    tau_pos: float = 1.0
    """SAPO: temperature of the gate where the advantage is above 0."""
    tau_neg: float = 1.05
    """SAPO: temperature elsewhere."""
    kl_coef: float = 0.0
    kl_type: KLType = KLType.LOW_VAR_KL_PLUS
    entropy_coef: float = 0.0
    correction: Correction | None = field(default_factory=Correction)
    """For a sampler that differs from the trainer. None: off."""
    distillation_coef: float = 1.0
    """Weight of a teacher's advantage, where there is a teacher."""
    sequence_mask: float | None = None
    """Leave out tokens with an advantage below 0 in trajectories whose mean log π_sampler / π is above this: the
    off-policy sequence mask of DeepSeek-V3.2 (2512.02556, section 3.1), there with one advantage for the whole
    sequence. None: off."""

    @property
    def sums_sampler(self) -> bool:
        """Whether the ratio of π_old to the sampler is needed of whole trajectories, over all packs."""
        corrected = self.correction is not None and self.correction.by_trajectory and not self.policy_loss.to_sampler
        return corrected or self.sums_drift

    @property
    def sums_drift(self) -> bool:
        """Whether that of π to the sampler is."""
        return self.sequence_mask is not None or (self.policy_loss.by_trajectory and self.policy_loss.to_sampler)

    @property
    def sums_ratio(self) -> bool:
        """Whether that of π to π_old is, which takes a forward pass of its own."""
        return self.policy_loss.by_trajectory or self.sums_drift


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
    drift_T: Tensor | None = None
    """Sequence mask, losses to the sampler by trajectory: mean log π / π_sampler of each. None: as above."""


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
    result = LossResult(new_E.sum() * 0.0, {"weight/sum": weight_M.sum()})

    def note(name: str, value_M: Tensor) -> None:
        result.sums[f"{name}/sum"] = (edges.weight_M * value_M).sum()

    loss = settings.policy_loss
    advantage_M = edges.advantage_M
    if not loss.imitates:
        if settings.correction is not None and not loss.to_sampler:
            gap_E = (old_E - edges.sampler_E).detach()
            correction_M = settings.correction.factors(gap_E, edges.trajectory_E, edges.sampler_log_ratio_T)[at]
            note("correction", correction_M)
            note("correction_masked", (correction_M == 0).to(new_E.dtype))
            weight_M = weight_M * correction_M
        result.sums["sampler_gap/max"] = (old_E.detach() - edges.sampler_E).abs().max()
        note("sampler_kl", (edges.sampler_E - old_E.detach())[at])
        if edges.teacher_E is not None:
            taught_M = (edges.teacher_E - old_E).detach()[at]
            note("teacher_kl", -taught_M)
            advantage_M = advantage_M + settings.distillation_coef * taught_M
        if settings.sequence_mask is not None:
            drift_E = trajectory_means((new_E - edges.sampler_E).detach(), edges.trajectory_E, edges.drift_T)
            left_out_M = (advantage_M < 0) & (-drift_E[at] > settings.sequence_mask)
            note("sequence_masked", left_out_M.to(new_E.dtype))
            weight_M = weight_M * ~left_out_M
    ratio_M = _log_ratio(new_E, old_E, edges, loss).clamp(max=MOST_LOG_RATIO).exp()[at]
    token_M, clipped_M = loss(
        LossTokens(
            new=new_E[at],
            old=old_E.detach()[at],
            sampler=edges.sampler_E[at],
            ratio=ratio_M,
            advantage=advantage_M,
            trajectory=edges.trajectory_E[at],
            settings=settings,
        )
    )
    if not loss.imitates:
        note("clip_fraction", clipped_M.detach().to(new_E.dtype))
        note("ratio", ratio_M.detach())
        result.sums["ratio/max"] = ratio_M.detach().max()
    note("policy", token_M.detach())
    result.loss = result.loss + (weight_M * token_M).sum()
    if edges.reference_E is not None and not loss.imitates:
        kl_M = divergence(new_E, edges.reference_E, settings.kl_type, old_E.detach())[at]
        note("kl", kl_M.detach())
        result.loss = result.loss + settings.kl_coef * (edges.weight_M * kl_M).sum()
    if entropy_E is not None:
        note("entropy", entropy_E.detach()[at])
        if settings.entropy_coef and not loss.imitates:
            result.loss = result.loss - settings.entropy_coef * (edges.weight_M * entropy_E[at]).sum()
    result.sums["total/sum"] = result.loss.detach()
    return result


def trajectory_sums(value_E: Tensor, trajectory_E: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sum and the number of edges of each trajectory."""
    sums = value_E.new_zeros(count).index_add_(0, trajectory_E, value_E)
    numbers = value_E.new_zeros(count).index_add_(0, trajectory_E, torch.ones_like(value_E))
    return sums, numbers


def _log_ratio(new_E: Tensor, old_E: Tensor, edges: EdgeTensors, loss: PolicyLoss) -> Tensor:
    """log of the ratio that the loss sees."""
    log_ratio_E = new_E - (edges.sampler_E if loss.to_sampler else old_E)
    if not loss.by_trajectory:
        return log_ratio_E
    given_T = edges.drift_T if loss.to_sampler else edges.log_ratio_T
    return trajectory_means(log_ratio_E.detach(), edges.trajectory_E, given_T) + new_E - new_E.detach()


def trajectory_means(value_E: Tensor, trajectory_E: Tensor, given_T: Tensor | None = None) -> Tensor:
    """The mean over each edge's trajectory. `given_T`: the means, where trajectories aren't whole among these edges."""
    if given_T is None:
        sums, numbers = trajectory_sums(value_E, trajectory_E, int(trajectory_E.max()) + 1)
        given_T = sums / numbers.clamp(min=1)
    return given_T[trajectory_E]
