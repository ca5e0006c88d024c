"""Your own policy loss and advantage estimator, `path/file.py->name`: found, and tried on a made-up batch before a run.

The contracts are `ajet.trainer.loss.LossFunction` and `ajet.trainer.credit.Formula`; what comes with this program is
written on them, too. Only what is your own is checked at each call: a wrong shape or a NaN is an error with its place
there, never a number that is trained. Imports no torch by itself.
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
    CallSummary,
    Comparison,
    CreditSettings,
    EpisodeSummary,
    compute_credit,
)

if TYPE_CHECKING:
    from ajet.trainer.loss import LossSettings, LossTokens, PolicyLoss, TokenLoss

LOSS_KEY = "ajet.trainer_common.algorithm.policy_loss"
ESTIMATOR_KEY = "ajet.trainer_common.algorithm.adv_estimator"
LOSS_FORM = "define `def {name}(tokens: LossTokens) -> Tensor`: one loss per token, the shape of tokens.new"
ESTIMATOR_FORM = "define `def {name}(of: Comparison) -> float`: the advantage of one value"

BaseDirs = Sequence[str | Path]


def find_policy_loss(named: str, base_dirs: BaseDirs = ()) -> PolicyLoss:
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


def find_estimator(named: str, base_dirs: BaseDirs = ()) -> AdvantageEstimator:
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
