"""`ajet.trainer_common`: how weights are updated, saved and validated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ajet.config.section import (
    AboveZero,
    Count,
    NonNegative,
    NotBool,
    OneOrMore,
    Positive,
    Real,
    Section,
    Share,
)

LoggerName = (
    Literal["swanlab", "wandb", "tensorboard", "mlflow", "console", "file"] | Annotated[str, Field(pattern=r".->.")]
)
"""A tracker by name, or a sink of the user's own (`path/file.py->Class`)."""


class RolloutCorrectionConfig(Section):
    """`ajet.trainer_common.algorithm.rollout_correction`: correct for a sampler that differs from the trainer."""

    mode: Literal["token_tis", "none"] = "token_tis"
    """`token_tis`: weight each token by min(trainer's probability / sampler's, cap)."""
    cap: AboveZero = 2.0
    """Upper bound of that weight."""


class SftConfig(Section):
    """`ajet.trainer_common.algorithm.sft`: what `policy_loss: sft` imitates."""

    demonstrations: str | None = None
    """A JSONL file of conversations (`{"messages": [...], "tools": [...]}`), or the `episodes.sqlite` of a run. null:
    the run's own episodes with a reward of at least `min_reward` (rejection sampling)."""
    min_reward: Real = 1.0
    """Reward from which a sampled or recorded episode is imitated."""


class OverlongConfig(Section):
    """`ajet.trainer_common.algorithm.overlong`: a soft penalty on long episodes."""

    buffer: Count = 0
    """From `data.max_response_length` minus this many trained tokens on, the reward falls linearly. 0: off."""
    penalty: NonNegative = 1.0
    """By how much it has fallen at `data.max_response_length`."""


class AlgorithmConfig(Section):
    """`ajet.trainer_common.algorithm`: from rewards to a loss."""

    adv_estimator: Literal["grpo", "drgrpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """How a reward becomes an advantage."""
    policy_loss: Literal["ppo", "gspo", "cispo", "sft"] = "ppo"
    """Which loss."""
    clip_low: Annotated[float, Field(ge=0, le=1), NotBool] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=100), NotBool] = 0.28
    """The probability ratio is clipped above 1 + clip_high."""
    loss_norm: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How tokens are weighted: all tokens alike, all episodes alike, or by a constant length."""
    entropy_coef: Real = 0.0
    """Weight of an entropy bonus."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the starting model from the reward."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Correct for a sampler that differs from the trainer."""
    zero_variance_groups: Literal["skip", "keep", "resample"] = "skip"
    """What to do with groups whose rewards are all equal: leave them out, keep them, or run other tasks instead."""
    sft: SftConfig = SftConfig()
    """What `policy_loss: sft` imitates."""
    overlong: OverlongConfig = OverlongConfig()
    """A soft penalty on long episodes."""
    per_agent_groups: bool = False
    """Compare agents of the same name with each other, instead of whole episodes."""


class FsdpConfig(Section):
    """`ajet.trainer_common.fsdp_config`: what is moved to main memory while not needed."""

    param_offload: bool = False
    """Keep parameters in main memory while not training."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in main memory while not updating."""


class OptimConfig(Section):
    """`ajet.trainer_common.optim`: the optimiser. verl's and Trinity's further keys go into the `verl:` or `trinity:`
    block.
    """

    lr: NonNegative = 1e-6
    """Learning rate. 0 trains nothing: a control run."""
    weight_decay: NonNegative = 0.01
    """Weight decay."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decay of the first and second moment."""
    clip_grad: AboveZero = 1.0
    """Norm at which the gradient is clipped."""
    lr_warmup_steps: Count = 0
    """Steps over which the learning rate rises to `lr`."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate continues after that."""


class TrainerCommonConfig(Section):
    """`ajet.trainer_common`: how weights are updated, saved and validated."""

    total_epochs: Positive = 50
    """Passes over the training tasks."""
    total_training_steps: Positive | None = None
    """Steps in total; takes precedence over `total_epochs`."""
    save_freq: Annotated[int, Field(ge=-1), NotBool] = 20
    """Save a checkpoint every this many steps, and at the end. -1 or 0: only at the end."""
    test_freq: Annotated[int, Field(ge=-1), NotBool] = 20
    """Validate every this many steps, and at the end. -1 or 0: never."""
    val_before_train: bool = False
    """Validate before the first step."""
    val_pass_n: Positive = 4
    """Episodes per validation task for pass@k, if validation samples (`rollout.val_kwargs`)."""
    val_only: bool = False
    """Only validate; train nothing."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From rewards to a loss."""
    optim: OptimConfig = OptimConfig()
    """The optimiser."""
    mini_batch_num: Positive = 1
    """Optimiser steps per training step."""
    use_kl_loss: bool = True
    """Add the KL divergence from the starting model to the loss."""
    kl_loss_coef: NonNegative = 0.002
    """Weight of that term."""
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"] = "low_var_kl"
    """Which estimate of the KL divergence."""
    max_tokens_per_step: Positive | Literal["auto"] = "auto"
    """Most unique tokens per forward and backward pass. A larger batch is split without changing its gradient;
    `auto`: depends on the device."""
    micro_tokens: Positive | Literal["auto"] = "auto"
    """Another name for `max_tokens_per_step`, used if that is `auto`."""
    keep_checkpoints: Positive = 3
    """How many of the newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation reward."""
    resume: str = "auto"
    """`auto`: resume from the newest checkpoint of this experiment; `never`; or a checkpoint's folder."""
    seed: Count = 0
    """Seed of the trainer."""
    logger: Annotated[list[LoggerName], OneOrMore] = ["console"]
    """Where metrics go besides `metrics.jsonl`: one name or a list; `path/file.py->Class` is a sink of your own."""
    checkpoint_base_dir: str | None = None
    """Folder for checkpoints instead of the experiment's own."""
    save_trajectory_as_json_file: bool = False
    """Also write each episode as a JSON file."""
    nnodes: Positive = 1
    """Machines."""
    n_gpus_per_node: Count = 8
    """GPUs per machine."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """What is moved to main memory while not needed."""
    ulysses_sequence_parallel_size: Positive = 1
    """GPUs that share one sequence."""
