"""Computes an advantage and a weight per trained token from rewards. Pure functions of serialisable summaries; numpy
only."""

from ajet.trainer.credit.baselines import Baseline, Comparison, Formula
from ajet.trainer.credit.estimators import (
    AdvantageEstimator,
    CallCredit,
    Credit,
    CreditSettings,
    EpisodeCredit,
    LossNorm,
    MiniBatch,
    ZeroVariance,
    compute_credit,
    imitation_credit,
    mini_batches,
    teaches,
)
from ajet.trainer.credit.summary import CallSummary, EpisodeSummary, Overlong, earned, summarise

__all__ = [
    "AdvantageEstimator",
    "Baseline",
    "CallCredit",
    "CallSummary",
    "Comparison",
    "Credit",
    "CreditSettings",
    "EpisodeCredit",
    "EpisodeSummary",
    "Formula",
    "LossNorm",
    "MiniBatch",
    "Overlong",
    "ZeroVariance",
    "compute_credit",
    "earned",
    "imitation_credit",
    "mini_batches",
    "summarise",
    "teaches",
]
