"""The settings of credit, loss and trainer, from the loaded configuration. Imports no torch by itself.

Your own policy loss and advantage estimator, `path/file.py->name`, are found here, and tried on a made-up batch before
a run. The contracts are `ajet.trainer.loss.LossFunction` and `ajet.trainer.credit.Formula`; what comes with this
program is written on them, too. Only what is your own is checked at each call: a wrong shape or a NaN is an error with
its place there, never a number that is trained.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ajet.config.kinds import ESTIMATORS, LOSSES, Kinds, load
from ajet.schema.errors import ImportPathError, OwnFormulaError, UserError
from ajet.schema.user_code import load_symbol
from ajet.trainer.credit import (
    AdvantageEstimator,
    Baseline,
    CallSummary,
    Comparison,
    CreditSettings,
    EpisodeSummary,
    LossNorm,
    Overlong,
    ZeroVariance,
    compute_credit,
)

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.tuning import AlgorithmConfig
    from ajet.trainer.loss import Correction, LossSettings, LossTokens, PolicyLoss, TokenLoss
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

FULL_LR = 1e-6
LORA_LR = 1e-5
"""Adapters learn best at about ten times the rate of whole weights."""


def is_address(teacher: str) -> bool:
    """Whether a server holds it, so that it isn't loaded here."""
    return teacher.startswith(("http://", "https://"))


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


def imitate_from(config: Config) -> float | None:
    """The least reward of an episode that is imitated; None: episodes are compared."""
    algorithm = config.ajet.trainer_common.algorithm
    return algorithm.sft.min_reward if algorithm.policy_loss == "sft" else None


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
    from ajet.trainer.loss import AdaptiveKL
    from ajet.trainer.trainer import TrainSettings

    common, adaptive = config.ajet.trainer_common, config.ajet.trainer_common.kl_adaptive
    return TrainSettings(
        loss=replace(
            loss_settings(config),
            correction=correction_settings(config),
            distillation_coef=common.algorithm.distillation.coef,
        ),
        optim=optim_settings(config, total_steps),
        kl_adaptive=None if adaptive.target is None else AdaptiveKL(adaptive.target, adaptive.horizon),
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
    policy_loss = find_policy_loss(algorithm.policy_loss, config.base_dirs)
    in_loss = common.use_kl_loss and not algorithm.use_kl_in_reward and not policy_loss.imitates
    return LossSettings(
        policy_loss=policy_loss,
        clip_low=low,
        clip_high=high,
        clip_dual=algorithm.clip_dual,
        tau_pos=algorithm.tau_pos,
        tau_neg=algorithm.tau_neg,
        sequence_mask=algorithm.sequence_mask,
        kl_coef=common.kl_loss_coef if in_loss else 0.0,
        kl_type=KLType(KL_TYPES[common.kl_loss_type]),
        entropy_coef=algorithm.entropy_coef,
        correction=None,
    )


def has_reference(config: Config) -> bool:
    """Whether the starting weights are kept beside the trained ones. With LoRA, the base weights serve instead."""
    in_reward = config.ajet.trainer_common.algorithm.use_kl_in_reward
    return not config.ajet.model.lora.enabled and (in_reward or loss_settings(config).kl_coef > 0)


def correction_settings(config: Config) -> Correction | None:
    """How a sampler that differs from the trainer is corrected for."""
    from ajet.trainer.loss import Correction, CorrectionMode, Level

    given = config.ajet.trainer_common.algorithm.rollout_correction
    if given.mode == "none":
        return None
    return Correction(CorrectionMode(given.mode), given.cap, Level(given.level), given.low, given.high)


# ---------------------------------------------------------------- your own formulas


LOSS_KEY = "ajet.trainer_common.algorithm.policy_loss"
ESTIMATOR_KEY = "ajet.trainer_common.algorithm.adv_estimator"
LOSS_FORM = "define `def {name}(tokens: LossTokens) -> Tensor`: one loss per token, the shape of tokens.new"
ESTIMATOR_FORM = "define `def {name}(of: Comparison) -> float`: the advantage of one value"

BaseDirs = Sequence[str | Path]


def find_policy_loss(named: str, base_dirs: BaseDirs) -> PolicyLoss:
    """What `algorithm.policy_loss` names. Raises a `UserError`."""
    from ajet.trainer.loss import PolicyLoss

    own = _Own(LOSS_KEY, named, LOSS_FORM)
    found = own.find(LOSSES, base_dirs)
    if named in LOSSES:
        return found  # type: ignore[no-any-return]
    loss = found if isinstance(found, PolicyLoss) else PolicyLoss(named, found)
    if loss.imitates:
        raise ImportPathError(f"{LOSS_KEY}: {named} imitates, which only `sft` does\n    leave `imitates` out")
    return replace(loss, name=named, function=_OwnLoss(own, own.takes_one(loss.function, "PolicyLoss")))


def find_estimator(named: str, base_dirs: BaseDirs) -> AdvantageEstimator:
    """What `algorithm.adv_estimator` names. Raises a `UserError`."""
    own = _Own(ESTIMATOR_KEY, named, ESTIMATOR_FORM)
    found = own.find(ESTIMATORS, base_dirs)
    if named in ESTIMATORS:
        return found  # type: ignore[no-any-return]
    estimator = found if isinstance(found, AdvantageEstimator) else AdvantageEstimator(named, found)
    formula = own.takes_one(estimator.formula, "AdvantageEstimator")
    return replace(estimator, name=named, formula=_OwnEstimator(own, formula))


@dataclass(frozen=True, slots=True)
class _Own:
    """Where something of your own is named, and what it should be."""

    key: str
    named: str
    form: str

    def find(self, kinds: Kinds, base_dirs: BaseDirs) -> Any:
        if self.named in kinds:
            return load(kinds, self.named)
        try:
            return load_symbol(self.named, base_dirs)
        except ImportPathError as error:
            raise ImportPathError(f"{self.key}: {error}") from error

    def takes_one(self, function: Any, alternative: str) -> Callable[[Any], Any]:
        """The function, if it can be called with one argument."""
        fix = self._fix()
        if isinstance(function, type) or not callable(function):
            kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
            raise ImportPathError(f"{self.key}: {self.named} is {kind}, not a function or {alternative}\n    {fix}")
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            taken = ", ".join(inspect.signature(function).parameters)
            where = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
            line = f" (line {where})" if where else ""
            raise ImportPathError(
                f"{self.key}: {self.named}{line} takes ({taken}), and is called with one argument\n    {fix}"
            ) from None
        return function  # type: ignore[no-any-return]

    def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except UserError:
            raise
        except Exception as error:
            file = self.named.partition("->")[0]
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == file] or frames
            at = f"{own[-1].filename}:{own[-1].lineno}"
            raise OwnFormulaError(
                f"{self.key}: {self.named} raised {type(error).__name__}: {error}\n    at {at}"
            ) from error

    def wrong(self, what: str) -> NoReturn:
        raise OwnFormulaError(f"{self.key}: {self.named} {what}\n    {self._fix()}")

    def _fix(self) -> str:
        return self.form.format(name=self.named.rpartition("->")[2].rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class _OwnEstimator:
    own: _Own
    formula: Callable[[Comparison], Any]

    def __call__(self, of: Comparison) -> float:
        found = self.own.call(self.formula, of)
        if isinstance(found, bool) or not isinstance(found, Real):
            self.own.wrong(f"returned {_kind(found)} instead of a number")
        if not math.isfinite(found):
            self.own.wrong(f"returned {found} for {of}")
        return float(found)


@dataclass(frozen=True, slots=True)
class _OwnLoss:
    own: _Own
    function: Callable[[LossTokens], Any]

    def __call__(self, tokens: LossTokens) -> TokenLoss:
        import torch

        from ajet.trainer.loss import TokenLoss

        found = self.own.call(self.function, tokens)
        loss = found.loss if isinstance(found, TokenLoss) else found
        clipped = found.clipped if isinstance(found, TokenLoss) else torch.zeros_like(tokens.new)
        for part in (loss, clipped):
            if not isinstance(part, torch.Tensor):
                self.own.wrong(f"returned {_kind(part)} instead of a Tensor, or a TokenLoss of two")
            if part.shape != tokens.new.shape:
                self.own.wrong(f"returned the shape {tuple(part.shape)}, and tokens.new has {tuple(tokens.new.shape)}")
        if not bool(torch.isfinite(loss).all()):
            self.own.wrong("returned a loss that is NaN or infinite")
        return TokenLoss(loss, clipped)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def try_estimator(estimator: AdvantageEstimator) -> None:
    """Credit two made-up groups. Raises a `UserError` if the estimator can't."""
    rewards = [(0.0, 0.5, 1.0), (-1.0, 1.0, 1.0)]
    groups = [
        [EpisodeSummary(f"{g}{e}", str(g), reward, [CallSummary("a", 3, leaves=[0])]) for e, reward in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    compute_credit(groups, CreditSettings(estimator=estimator))


def try_policy_loss(settings: LossSettings) -> None:
    """Compute the loss and gradient of a made-up pack: three trajectories of different lengths, advantages of both
    signs and 0, probabilities that moved either way. Raises a `UserError` if the loss can't be trained."""
    import torch

    from ajet.trainer.loss import EdgeTensors, policy_loss

    own = _Own(LOSS_KEY, settings.policy_loss.name, LOSS_FORM)
    old = torch.tensor([-0.1, -1.0, -2.0, -0.5, -3.0, -0.01, -5.0, -0.7])
    new = (old + torch.tensor([0.05, -0.4, 0.6, 0.0, -0.02, -0.3, 1.0, 0.1])).requires_grad_()
    edges = EdgeTensors(
        sampler_E=old - 0.01,
        trajectory_E=torch.tensor([0, 1, 1, 1, 2, 2, 2, 2]),
        entry_edge_M=torch.arange(8),
        advantage_M=torch.tensor([1.0, -1.0, -1.0, -1.0, 0.5, 0.5, 0.0, 0.5]),
        weight_M=torch.full((8,), 1 / 8),
        old_E=old,
    )
    loss = policy_loss(new, edges, settings).loss
    gradient = torch.autograd.grad(loss, new, allow_unused=True)[0]
    if gradient is None or not bool(gradient.any()):
        own.wrong("has no gradient: it depends on neither tokens.new nor tokens.ratio")
    if not bool(torch.isfinite(gradient).all()):
        own.wrong("has a gradient that is NaN or infinite, on finite tokens")
