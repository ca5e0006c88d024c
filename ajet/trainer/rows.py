"""Ordinary padded rows out of a pack without sharing: which rows go together into one batch."""

from __future__ import annotations

from ajet.trainer.pack import Pack

SPREAD = 1.2
"""A batch's longest row is at most this much longer than its shortest: the rest would be padding."""

SHORT = 32
"""Rows up to this length go together whatever their lengths: a batch of its own costs more than the padding."""


def row_batches(pack: Pack, budget: int) -> list[list[int]]:
    """Indices in `pack.rows`, by length, each batch within the budget of padded tokens (a longer row alone)."""
    lengths = [end - start for start, end in pack.rows]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[row]
        fits = (
            batches
            and (len(batches[-1]) + 1) * length <= budget
            and length <= max(SPREAD * lengths[batches[-1][0]], SHORT)
        )
        if fits:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded_tokens(pack: Pack, budget: int) -> int:
    """Tokens that are computed, padding included."""
    lengths = [end - start for start, end in pack.rows]
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in row_batches(pack, budget))
