"""A policy loss as a user would write it: the advantage of the log-likelihood, fading as the ratio leaves 1."""

from __future__ import annotations

from torch import Tensor

from ajet.trainer.loss import LossTokens


def fading(tokens: LossTokens) -> Tensor:
    log_ratio = tokens.ratio.detach().log()
    return -tokens.advantage * tokens.new / (1.0 + (log_ratio / tokens.settings.clip_high) ** 2)
