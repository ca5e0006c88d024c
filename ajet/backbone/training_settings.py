"""The settings of credit, loss and trainer, from the loaded configuration. Imports no torch by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ajet.backbone.own_formulas import find_estimator, find_policy_loss
from ajet.trainer.credit import Baseline, CreditSettings, LossNorm, Overlong, ZeroVariance

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.tuning import AlgorithmConfig
    from ajet.trainer.loss import AdaptiveKL, Correction, LossSettings
    from ajet.trainer.optimizer import OptimSettings
    from ajet.trainer.trainer import TrainSettings

KL_TYPES = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
    "kl+": "k1+",
    "k1+": "k1+",
    "low_var_kl+": "low_var_kl+",
    "k3+": "low_var_kl+",
    "k3_corrected": "low_var_kl_corrected",
}
"""Names in `kl_loss_type`, those of existing files and ours."""

CLIP_RANGE = (0.2, 0.28)
CLIP_RANGES = {"gspo": (3e-4, 4e-4), "dppo_tv": (0.15, 0.15), "dppo_kl": (0.05, 0.05)}
"""Where the loss bounds something else than a token's ratio. `gspo`, from its paper: a trajectory's ratio, which is a
mean and hardly moves. `dppo`, from published scripts: a difference of probabilities, or nats."""

TEACHER = "ajet.trainer_common.algorithm.distillation.teacher"
"""Its key, in messages."""

FULL_LR = 1e-6
LORA_LR = 1e-5
"""Adapters learn best at about ten times the rate of whole weights."""


def clip_range(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """`clip_low` and `clip_high`, or the defaults of the loss."""
    low, high = CLIP_RANGES.get(algorithm.policy_loss, CLIP_RANGE)
    given_low, given_high = algorithm.clip_low, algorithm.clip_high
    return (low if given_low is None else given_low), (high if given_high is None else given_high)


def learning_rate(config: Config) -> float:
    """`optim.lr`, or the default for whole weights or adapters."""
    given = config.ajet.trainer_common.optim.lr
    if given is not None:
        return given
    return LORA_LR if config.ajet.model.lora.enabled else FULL_LR


def warmup_steps(config: Config, total_steps: int) -> int:
    """Training steps of the warm-up."""
    optim = config.ajet.trainer_common.optim
    return optim.lr_warmup_steps or int(optim.lr_warmup_ratio * total_steps)


def taught_alone(config: Config) -> bool:
    """Whether a teacher's advantage is the only one."""
    distillation = config.ajet.trainer_common.algorithm.distillation
    return distillation.teacher is not None and distillation.mode == "alone"


def credit_settings(config: Config) -> CreditSettings:
    """How rewards become advantages and weights."""
    ajet = config.ajet
    algorithm = ajet.trainer_common.algorithm
    taught = algorithm.distillation.teacher is not None
    overlong = None
    if algorithm.overlong.buffer:
        overlong = Overlong(ajet.data.max_response_length, algorithm.overlong.buffer, algorithm.overlong.penalty)
    return CreditSettings(
        estimator=find_estimator(algorithm.adv_estimator, config.base_dirs),
        baseline=_baseline(config),
        loss_norm=LossNorm(algorithm.loss_norm),
        # a teacher has something to say about groups with equal rewards too
        zero_variance=ZeroVariance.KEEP if taught else ZeroVariance(algorithm.zero_variance_groups),
        gamma=ajet.rollout.gamma,
        state_weight=algorithm.state_weight,
        pass_k=algorithm.pass_k,
        success_threshold=ajet.task_judge.success_threshold,
        multiplicity=ajet.context_tracker.shared_token_loss == "multiplicity",
        dr_grpo_length=float(ajet.data.max_response_length),
        overlong=overlong,
        mask_overlong=algorithm.overlong.mask,
    )


def _baseline(config: Config) -> Baseline:
    asked = config.ajet.trainer_common.algorithm.baseline
    if asked != "auto":
        return Baseline(asked)
    return Baseline.TURN if config.ajet.rollout.gamma < 1 else Baseline.EPISODE


def checkpointing(config: Config, *, on_gpu: bool) -> bool:
    """Whether layers are computed again in the backward pass."""
    asked = config.ajet.trainer_common.gradient_checkpointing
    return on_gpu if asked == "auto" else asked


def pack_tokens(config: Config) -> int | None:
    """Most unique tokens of a pass; None: it depends on the device."""
    common = config.ajet.trainer_common
    budget = common.micro_tokens if common.max_tokens_per_step == "auto" else common.max_tokens_per_step
    return None if budget == "auto" else budget


def logits_chunk(config: Config) -> int | None:
    """Most positions whose logits exist at a time; None: it depends on the vocabulary. 0: no limit."""
    asked = config.ajet.trainer_common.logits_chunk
    return None if asked == "auto" else asked


def train_settings(config: Config, total_steps: int, *, on_gpu: bool = False) -> TrainSettings:
    """How a batch becomes an update."""
    from ajet.trainer.trainer import TrainSettings

    common = config.ajet.trainer_common
    return TrainSettings(
        loss=replace(
            loss_settings(config),
            correction=correction_settings(config),
            distillation_coef=common.algorithm.distillation.coef,
        ),
        optim=optim_settings(config, total_steps),
        kl_adaptive=_kl_adaptive(config),
        reference_sync=common.kl_reference_sync,
        mini_batches=common.mini_batch_num,
        epochs=common.ppo_epochs,
        max_tokens=pack_tokens(config),
        logits_chunk=logits_chunk(config),
        gradient_checkpointing=checkpointing(config, on_gpu=on_gpu),
        compile=common.compile,
        liger=common.logits_kernel == "liger",
        follows_sampler=config.ajet.rollout.routing_replay,
        seed=common.seed,
    )


def optim_settings(config: Config, total_steps: int) -> OptimSettings:
    """How the weights are updated."""
    from ajet.trainer.optimizer import OptimSettings

    optim = config.ajet.trainer_common.optim
    return OptimSettings(
        lr=learning_rate(config),
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        state_bits=optim.state_bits,
        master=optim.master,
        in_main_memory=config.ajet.trainer_common.fsdp_config.optimizer_offload,
        warmup_steps=warmup_steps(config, total_steps),
        schedule=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        total_steps=total_steps,
    )


def loss_settings(config: Config) -> LossSettings:
    """The loss and its terms, without a correction for the sampler."""
    from ajet.trainer.loss import KLType, LossSettings

    common = config.ajet.trainer_common
    algorithm = common.algorithm
    low, high = clip_range(algorithm)
    return LossSettings(
        policy_loss=find_policy_loss(algorithm.policy_loss, config.base_dirs),
        clip_low=low,
        clip_high=high,
        clip_dual=algorithm.clip_dual,
        tau_pos=algorithm.tau_pos,
        tau_neg=algorithm.tau_neg,
        sequence_mask=algorithm.sequence_mask,
        kl_coef=common.kl_loss_coef if common.use_kl_loss and not algorithm.use_kl_in_reward else 0.0,
        kl_type=KLType(KL_TYPES[common.kl_loss_type]),
        entropy_coef=algorithm.entropy_coef,
        correction=None,
    )


def correction_settings(config: Config) -> Correction | None:
    """How a sampler that differs from the trainer is corrected for."""
    from ajet.trainer.loss import Correction, CorrectionMode, Level

    given = config.ajet.trainer_common.algorithm.rollout_correction
    if given.mode == "none":
        return None
    return Correction(CorrectionMode(given.mode), given.cap, Level(given.level), given.low, given.high)


def _kl_adaptive(config: Config) -> AdaptiveKL | None:
    from ajet.trainer.loss import AdaptiveKL

    adaptive = config.ajet.trainer_common.kl_adaptive
    return None if adaptive.target is None else AdaptiveKL(adaptive.target, adaptive.horizon)
