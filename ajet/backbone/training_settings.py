"""The settings of credit, loss and trainer, from the loaded configuration. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.credit import AdvantageEstimator, CreditSettings, LossNorm, Overlong, ZeroVariance
from ajet.schema.errors import FeatureUnavailableError

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.trainer.trainer import TrainSettings

KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
"""Names in `kl_loss_type`, those of existing files and ours."""


def credit_settings(config: Config) -> CreditSettings:
    """How rewards become advantages and weights."""
    ajet = config.ajet
    algorithm = ajet.trainer_common.algorithm
    overlong = None
    if algorithm.overlong.buffer:
        overlong = Overlong(ajet.data.max_response_length, algorithm.overlong.buffer, algorithm.overlong.penalty)
    return CreditSettings(
        estimator=AdvantageEstimator(algorithm.adv_estimator),
        loss_norm=LossNorm(algorithm.loss_norm),
        zero_variance=ZeroVariance(algorithm.zero_variance_groups),
        gamma=ajet.rollout.gamma,
        per_agent_groups=algorithm.per_agent_groups,
        multiplicity=ajet.context_tracker.shared_token_loss == "multiplicity",
        dr_grpo_length=float(ajet.data.max_response_length),
        overlong=overlong,
    )


def train_settings(config: Config, total_steps: int) -> TrainSettings:
    """How a batch becomes an update."""
    from ajet.trainer.loss import KLType, LossSettings, PolicyLoss
    from ajet.trainer.optimizer import OptimSettings
    from ajet.trainer.trainer import TrainSettings

    common = config.ajet.trainer_common
    algorithm, optim = common.algorithm, common.optim
    kind = KL_TYPES.get(common.kl_loss_type)
    if kind is None:
        raise FeatureUnavailableError(
            f"ajet.trainer_common.kl_loss_type: the local backbone has no {common.kl_loss_type!r}; "
            f"available: {', '.join(KL_TYPES)}"
        )
    correction = algorithm.rollout_correction
    budget = common.micro_tokens if common.max_tokens_per_step == "auto" else common.max_tokens_per_step
    return TrainSettings(
        loss=LossSettings(
            policy_loss=PolicyLoss(algorithm.policy_loss),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=common.kl_loss_coef if common.use_kl_loss else 0.0,
            kl_type=KLType(kind),
            entropy_coef=algorithm.entropy_coef,
            correction_cap=correction.cap if correction.mode == "token_tis" else None,
        ),
        optim=OptimSettings(
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            clip_grad=optim.clip_grad,
            warmup_steps=optim.lr_warmup_steps,
            schedule=optim.lr_scheduler_type,
            total_steps=total_steps * common.mini_batch_num,
        ),
        mini_batches=common.mini_batch_num,
        max_tokens=None if budget == "auto" else budget,
        seed=common.seed,
    )
