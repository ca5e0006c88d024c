"""From rewards to an advantage and a weight per trained token. Pure functions of serialisable summaries; numpy only."""

from ajet.credit.baselines import Baseline
from ajet.credit.estimators import (
    AdvantageEstimator,
    CreditSettings,
    ZeroVariance,
    compute_credit,
    imitation_credit,
    teaches,
)
from ajet.credit.mini_batches import MiniBatch, mini_batches
from ajet.credit.returns import Overlong, earned
from ajet.credit.summary import CallSummary, EpisodeSummary, summarise
from ajet.credit.weights import CallCredit, Credit, EpisodeCredit, LossNorm

__all__ = [
    "AdvantageEstimator",
    "Baseline",
    "CallCredit",
    "CallSummary",
    "Credit",
    "CreditSettings",
    "EpisodeCredit",
    "EpisodeSummary",
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
