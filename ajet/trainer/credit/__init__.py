"""Computes an advantage and a weight per trained token from rewards. Pure functions of serialisable summaries; numpy
only."""

from ajet.trainer.credit.baselines import Baseline as Baseline
from ajet.trainer.credit.baselines import Comparison as Comparison
from ajet.trainer.credit.baselines import Formula as Formula
from ajet.trainer.credit.estimators import AdvantageEstimator as AdvantageEstimator
from ajet.trainer.credit.estimators import CallCredit as CallCredit
from ajet.trainer.credit.estimators import Credit as Credit
from ajet.trainer.credit.estimators import CreditSettings as CreditSettings
from ajet.trainer.credit.estimators import EpisodeCredit as EpisodeCredit
from ajet.trainer.credit.estimators import LossNorm as LossNorm
from ajet.trainer.credit.estimators import MiniBatch as MiniBatch
from ajet.trainer.credit.estimators import ZeroVariance as ZeroVariance
from ajet.trainer.credit.estimators import compute_credit as compute_credit
from ajet.trainer.credit.estimators import imitation_credit as imitation_credit
from ajet.trainer.credit.estimators import mini_batches as mini_batches
from ajet.trainer.credit.estimators import teaches as teaches
from ajet.trainer.credit.summary import CallSummary as CallSummary
from ajet.trainer.credit.summary import EpisodeSummary as EpisodeSummary
from ajet.trainer.credit.summary import Overlong as Overlong
from ajet.trainer.credit.summary import earned as earned
from ajet.trainer.credit.summary import summarise as summarise
