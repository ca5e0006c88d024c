"""How much each trained token counts: the loss is the sum over tokens of weight x token loss.

The weights of a batch depend on its episodes alone, never on how an episode was split into calls, rows or packs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ajet.credit.summary import EpisodeSummary


class LossNorm(StrEnum):
    """What one episode's tokens are divided by."""

    TOKEN_MEAN = "token_mean"
    """1 / all trained tokens of the batch: every token counts the same."""
    SEQUENCE_MEAN = "sequence_mean"
    """1 / (episodes x the episode's tokens): every episode counts the same."""
    DR_GRPO = "dr_grpo"
    """1 / (episodes x a constant length): no bias towards short or long episodes."""


@dataclass(slots=True)
class CallCredit:
    """The credit of one call. All its trained tokens share it."""

    entries: list[tuple[float, float]] = field(default_factory=list)
    """(advantage, weight) pairs. One, or with `multiplicity` one a leaf; none if the call is not trained.
    A token's loss is the sum over them of weight x loss(advantage): clipping is not linear, so never add them up."""

    @property
    def advantage(self) -> float:
        """For tables and logs: the mean advantage; 0 without entries."""
        return sum(advantage for advantage, _ in self.entries) / len(self.entries) if self.entries else 0.0

    @property
    def weight(self) -> float:
        """For tables and logs: the total weight of each token."""
        return sum(weight for _, weight in self.entries)


@dataclass(slots=True)
class EpisodeCredit:
    """The credit of one episode's calls, in the order of its tree."""

    episode_id: str
    calls: list[CallCredit]
    skipped: bool = False
    """Its group taught nothing (zero variance): none of its calls has an entry."""


@dataclass(slots=True)
class Credit:
    """The credit of a batch: one list an input group, in the same order."""

    groups: list[list[EpisodeCredit]]
    zero_variance_groups: int = 0
    """Groups whose episodes all had the same reward."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[EpisodeCredit]:
        return [episode for group in self.groups for episode in group]


def token_weights(episodes: list[EpisodeSummary], norm: LossNorm, length: float, multiplicity: bool) -> list[float]:
    """The weight of a token (of one entry of it) in each episode; `length` is Dr.GRPO's constant."""
    counts = [episode.row_tokens if multiplicity else episode.tokens for episode in episodes]
    trained = sum(1 for count in counts if count)
    if norm is LossNorm.TOKEN_MEAN:
        total = sum(counts)
        return [1.0 / total if count else 0.0 for count in counts]
    if norm is LossNorm.SEQUENCE_MEAN:
        return [1.0 / (trained * count) if count else 0.0 for count in counts]
    return [1.0 / (trained * length) if count else 0.0 for count in counts]
