"""The divergence of the policy from its reference: estimates at sampled tokens; a coefficient that follows a target.

Shape: E edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


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
        """The coefficient of the next step. A divergence that is no number says nothing."""
        if math.isnan(measured):
            return coefficient
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error / self.horizon)
