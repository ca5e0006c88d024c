"""Which row is trained in which of a step's updates. Pure: no verl, no Ray, no tensors.

As in the embedded trainer: whole episodes, shuffled, go into parts of about the same number, and each part is weighed
as a batch of its own. verl and Trinity cut a batch into equal pieces by position (first by rank, then by update), so
rows are put where they belong and the parts are filled up to equal size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from ajet.credit import LossNorm, mini_batch_scales


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What must be known of a row."""

    episode: str
    length: int
    """Tokens, the prompt's included."""
    trained: int
    """Tokens with a weight."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a batch go."""

    order: list[int | None]
    """A row's index for each place; None: a row that trains nothing."""
    scales: list[float]
    """By what each row's weights are multiplied, in the order of the rows."""
    size: int
    """Rows of one update, on all ranks."""


def lay_out(
    rows: Sequence[BatchRow], *, norm: LossNorm, updates: int, ranks: int, multiple: int, seed: Sequence[int]
) -> Layout:
    """Places for rows on so many data-parallel ranks. An update's rows are a multiple of `multiple`."""
    parts = _parts(rows, updates, seed)
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.episode] += row.trained
    episodes = [list(dict.fromkeys(rows[index].episode for index in part)) for part in parts]
    factors = [1.0]
    if len(parts) > 1:
        factors = mini_batch_scales(norm, [[tokens[name] for name in names] for names in episodes])
    scales = [0.0] * len(rows)
    for part, factor in zip(parts, factors, strict=True):
        for index in part:
            scales[index] = factor
    unit = lcm(ranks, multiple)
    size = -(-max(len(part) for part in parts) // unit) * unit
    order: list[int | None] = []
    for rank in range(ranks):
        for part in parts:
            dealt = sorted(part, key=lambda index: -rows[index].length)[rank::ranks]
            order += [*dealt, *[None] * (size // ranks - len(dealt))]
    return Layout(order, scales, size)


def _parts(rows: Sequence[BatchRow], updates: int, seed: Sequence[int]) -> list[list[int]]:
    """Indices of the rows of each update: at most `updates`, none empty."""
    episodes = list(dict.fromkeys(row.episode for row in rows if row.trained))
    if updates == 1 or len(episodes) < 2:
        return [list(range(len(rows)))]
    drawn = list(range(len(episodes)))
    np.random.default_rng(list(seed)).shuffle(drawn)
    part_of = {
        episodes[index]: number
        for number, part in enumerate(np.array_split(np.array(drawn), min(updates, len(episodes))))
        for index in part.tolist()
    }
    parts: list[list[int]] = [[] for _ in range(min(updates, len(episodes)))]
    for index, row in enumerate(rows):
        if row.trained:
            parts[part_of[row.episode]].append(index)
    return parts
