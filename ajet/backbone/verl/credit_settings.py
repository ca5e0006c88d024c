"""Credit settings from a loaded configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.credit import AdvantageEstimator, CreditSettings, LossNorm, ZeroVariance

if TYPE_CHECKING:
    from ajet.config import Config


def credit_settings(config: Config) -> CreditSettings:
    """How this run turns rewards into advantages and weights."""
    ajet = config.ajet
    algorithm = ajet.trainer_common.algorithm
    return CreditSettings(
        estimator=AdvantageEstimator(algorithm.adv_estimator),
        loss_norm=LossNorm(algorithm.loss_norm),
        zero_variance=ZeroVariance(algorithm.zero_variance_groups),
        gamma=ajet.rollout.gamma,
        per_agent_groups=algorithm.per_agent_groups,
        multiplicity=ajet.context_tracker.shared_token_loss == "multiplicity",
        dr_grpo_length=float(ajet.data.max_response_length),
    )
