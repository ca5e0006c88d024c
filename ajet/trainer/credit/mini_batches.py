"""A batch divided among a step's updates: whole episodes, shuffled, in parts of about the same number of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ajet.trainer.credit.weights import LossNorm


class MiniBatch(NamedTuple):
    """The episodes of one update."""

    episodes: list[int]
    """Their places in the batch."""
    scale: float
    """By what to multiply their weights, so that they weigh as a batch of their own would."""


def mini_batches(tokens: Sequence[int], count: int, norm: LossNorm, seed: Sequence[int]) -> list[MiniBatch]:
    """At most `count` parts, none empty. `tokens`: the trained tokens (entries of them) of each trained episode.

    With a norm over episodes, parts are as large as their numbers of episodes; with the mean over tokens, as their
    numbers of tokens.
    """
    order = list(range(len(tokens)))
    if count == 1 or len(order) < 2:
        return [MiniBatch(order, 1.0)]
    np.random.default_rng(list(seed)).shuffle(order)
    parts = [part.tolist() for part in np.array_split(np.array(order), min(count, len(order)))]
    if norm is LossNorm.TOKEN_MEAN:
        return [MiniBatch(part, sum(tokens) / sum(tokens[index] for index in part)) for part in parts]
    return [MiniBatch(part, len(order) / len(part)) for part in parts]
