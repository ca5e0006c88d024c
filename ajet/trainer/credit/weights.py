"""How much each trained token counts, and the mini-batches of a step: the loss is the sum of weight x token loss.

Weights depend only on the batch's episodes, never on how an episode was split into calls, rows or packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ajet.trainer.credit.summary import EpisodeSummary


class LossNorm(StrEnum):
    """What an episode's token losses are divided by."""

    TOKEN_MEAN = "token_mean"
    """1 / all trained tokens of the batch: every token counts the same."""
    SEQUENCE_MEAN = "sequence_mean"
    """1 / (trained episodes x the episode's tokens): every episode counts the same."""
    DR_GRPO = "dr_grpo"
    """1 / (all episodes x a constant length): no bias by length, nor by how many groups teach something."""


@dataclass(slots=True)
class CallCredit:
    """The credit of one call, shared by all its trained tokens."""

    entries: list[tuple[float, float]] = field(default_factory=list)
    """(advantage, weight) pairs: one, or with `multiplicity` one per leaf; none if the call isn't trained.
    A token's loss is the sum over them of weight x loss(advantage). Never add them up: clipping isn't linear."""

    @property
    def advantage(self) -> float:
        """The mean advantage, for tables and logs; 0 without entries."""
        return sum(advantage for advantage, _ in self.entries) / len(self.entries) if self.entries else 0.0

    @property
    def weight(self) -> float:
        """The total weight of each token, for tables and logs."""
        return sum(weight for _, weight in self.entries)


@dataclass(slots=True)
class EpisodeCredit:
    """The credit of one episode's calls, in the order of its tree."""

    episode_id: str
    calls: list[CallCredit]
    skipped: bool = False
    """Left out because its group has zero variance: none of its calls has an entry."""
    norm: LossNorm = LossNorm.TOKEN_MEAN
    """What its weights are divided by, in each part of the batch that is an update of its own."""

    @property
    def trained(self) -> bool:
        """Whether any of its tokens is trained."""
        return any(call.entries for call in self.calls)


@dataclass(slots=True)
class Credit:
    """The credit of a batch: one list per group, in the order of the groups."""

    groups: list[list[EpisodeCredit]]
    zero_variance_groups: int = 0
    """Groups whose episodes all had the same reward."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[EpisodeCredit]:
        return [episode for group in self.groups for episode in group]


def token_weights(
    groups: Sequence[Sequence[EpisodeSummary]],
    trained: Sequence[Sequence[bool]],
    norm: LossNorm,
    length: float,
    multiplicity: bool,
) -> list[list[float]]:
    """The weight of a token (of one entry of it) in each episode; 0 in episodes that aren't trained.

    `length` is Dr.GRPO's constant. Its other factor counts every episode of the batch, trained or not.
    """
    counts = [
        [
            (episode.row_tokens if multiplicity else episode.tokens) if kept else 0
            for episode, kept in zip(*pair, strict=True)
        ]
        for pair in zip(groups, trained, strict=True)
    ]
    tokens = sum(map(sum, counts))
    holding = sum(count > 0 for group in counts for count in group)
    everyone = sum(map(len, groups))

    def weight(count: int) -> float:
        if not count:
            return 0.0
        if norm is LossNorm.TOKEN_MEAN:
            return 1.0 / tokens
        return 1.0 / (holding * count) if norm is LossNorm.SEQUENCE_MEAN else 1.0 / (everyone * length)

    return [[weight(count) for count in group] for group in counts]


class MiniBatch(NamedTuple):
    """The episodes of one update."""

    episodes: list[int]
    """Their places in the batch."""
    scale: float
    """The factor for their weights that makes them count like a separate batch."""


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
