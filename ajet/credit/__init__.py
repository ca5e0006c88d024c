"""From rewards to an advantage and a weight per trained token. Pure functions of serialisable summaries; numpy only."""

from ajet.credit.estimators import (
    AdvantageEstimator,
    CreditSettings,
    Overlong,
    ZeroVariance,
    compute_credit,
    imitation_credit,
)
from ajet.credit.summary import CallSummary, EpisodeSummary, summarise
from ajet.credit.weights import CallCredit, Credit, EpisodeCredit, LossNorm

__all__ = [
    "AdvantageEstimator",
    "CallCredit",
    "CallSummary",
    "Credit",
    "CreditSettings",
    "EpisodeCredit",
    "EpisodeSummary",
    "LossNorm",
    "Overlong",
    "ZeroVariance",
    "compute_credit",
    "imitation_credit",
    "summarise",
]
