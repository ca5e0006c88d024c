"""`RewardHistogram`: how the rewards of each training step's episodes are spread."""

from __future__ import annotations

from dataclasses import dataclass

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


def reward_histogram(store: EpisodeStore) -> RewardHistogram:
    """Of the training episodes in a store."""
    found = store.rows(
        "SELECT step, reward, count(*) FROM episode WHERE validation = 0 AND reward IS NOT NULL "
        "AND status != 'cancelled' GROUP BY step, reward"
    )
    values = sorted({row[1] for row in found})
    bins = _bins(values)
    steps = sorted({row[0] for row in found})
    counts = {step: [0] * len(bins) for step in steps}
    place = {value: index for index, value in enumerate(values)} if len(bins) == len(values) else None
    for step, reward, count in found:
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
