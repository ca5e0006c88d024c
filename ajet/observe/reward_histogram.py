"""`RewardHistogram`: how the rewards of each training step's episodes are spread, in one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ajet.observe.episode_store import EpisodeStore

_MOST_VALUES = 12
"""Up to so many different rewards, each is a bin of its own; of more, equal ranges are made."""
_RANGES = 16


@dataclass(slots=True)
class RewardHistogram:
    """Counts by step and bin, of the recorded episodes that have a reward."""

    bins: list[tuple[float, float]]
    """Lowest and highest reward of each, ascending. Equal: only that value."""
    steps: list[int]
    counts: list[list[int]]
    """Per step, the number of episodes in each bin."""


class RewardCount(NamedTuple):
    """How many episodes of a step have this reward."""

    step: int
    reward: float
    episodes: int


def reward_counts(store: EpisodeStore) -> list[RewardCount]:
    """What a store's training episodes were rewarded with."""
    found = store.rows(
        "SELECT step, reward, count(*) FROM episode WHERE validation = 0 AND reward IS NOT NULL "
        "AND status != 'cancelled' GROUP BY step, reward"
    )
    return [RewardCount(*row) for row in found]


def reward_histograms(runs: Sequence[Sequence[RewardCount]]) -> list[RewardHistogram]:
    """Of several runs, all with the same bins, so that they can be compared."""
    values = sorted({found.reward for run in runs for found in run})
    bins = _bins(values)
    return [_histogram(run, values, bins) for run in runs]


def _histogram(run: Sequence[RewardCount], values: list[float], bins: list[tuple[float, float]]) -> RewardHistogram:
    steps = sorted({found.step for found in run})
    counts = {step: [0] * len(bins) for step in steps}
    place = {value: index for index, value in enumerate(values)} if len(bins) == len(values) else None
    for step, reward, count in run:
        counts[step][place[reward] if place is not None else _range_of(reward, values)] += count
    return RewardHistogram(bins, steps, [counts[step] for step in steps])


def _bins(values: list[float]) -> list[tuple[float, float]]:
    if len(values) <= _MOST_VALUES:
        return [(value, value) for value in values]
    low, width = values[0], (values[-1] - values[0]) / _RANGES
    return [(low + index * width, low + (index + 1) * width) for index in range(_RANGES)]


def _range_of(reward: float, values: list[float]) -> int:
    low, high = values[0], values[-1]
    return min(_RANGES - 1, int((reward - low) / (high - low) * _RANGES))
