"""Which row is trained in which of a step's updates. Pure: no verl, no Ray, no tensors.

The parts are those of the embedded trainer. verl and Trinity cut a batch into equal pieces by position (first by rank,
then by update), so rows are put where they belong and the parts are filled up to equal size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ajet.trainer.credit import LossNorm, mini_batches


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
    tokens: Counter[str] = Counter()
    for row in rows:
        if row.trained:
            tokens[row.episode] += row.trained
    episodes = list(tokens)
    drawn = mini_batches(list(tokens.values()), updates, norm, seed)
    parts, scales = [list(range(len(rows)))], [1.0] * len(rows)
    if len(drawn) > 1:
        part_of = {episodes[index]: number for number, part in enumerate(drawn) for index in part.episodes}
        parts, scales = [[] for _ in drawn], [0.0] * len(rows)
        for index, row in enumerate(rows):
            if row.trained:
                number = part_of[row.episode]
                parts[number].append(index)
                scales[index] = drawn[number].scale
    unit = lcm(ranks, multiple)
    size = -(-max(len(part) for part in parts) // unit) * unit
    order: list[int | None] = []
    for rank in range(ranks):
        for part in parts:
            dealt = sorted(part, key=lambda index: -rows[index].length)[rank::ranks]
            order += [*dealt, *[None] * (size // ranks - len(dealt))]
    return Layout(order, scales, size)
