"""Rows go whole episodes at a time into updates of equal size, and each update is weighed as a batch of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ajet.backbone.ray.credit import BatchRow, lay_out
from ajet.trainer.credit import LossNorm


def make_rows(episodes: int, *, seed: int = 1) -> list[BatchRow]:
    """Episodes of one to three rows of uneven length."""
    rng = np.random.default_rng(seed)
    rows = []
    for episode in range(episodes):
        for _ in range(int(rng.integers(1, 4))):
            trained = int(rng.integers(1, 50))
            rows.append(BatchRow(f"e{episode}", trained + 10, trained))
    return rows


@pytest.mark.parametrize(("updates", "ranks", "multiple"), [(1, 1, 1), (1, 8, 4), (2, 1, 4), (3, 2, 1), (4, 6, 4)])
def test_each_rank_finds_its_share_of_each_update(updates: int, ranks: int, multiple: int) -> None:
    rows = make_rows(13)
    layout = lay_out(rows, norm=LossNorm.TOKEN_MEAN, updates=updates, ranks=ranks, multiple=multiple, seed=(0, 0))
    assert layout.size % multiple == layout.size % ranks == 0
    assert len(layout.order) == layout.size * updates
    assert sorted(index for index in layout.order if index is not None) == list(range(len(rows)))
    by_rank = np.array(layout.order, dtype=object).reshape(ranks, updates, layout.size // ranks)
    update_of: dict[str, set[int]] = {}
    for update in range(updates):
        here = [index for index in by_rank[:, update].flatten().tolist() if index is not None]
        for index in here:
            update_of.setdefault(rows[index].episode, set()).add(update)
        shares = [sum(index is not None for index in share) for share in by_rank[:, update].tolist()]
        assert max(shares) - min(shares) <= 1
    assert all(len(updates_of) == 1 for updates_of in update_of.values())
    assert max(Counter(next(iter(one)) for one in update_of.values()).values()) <= -(-13 // updates)


@pytest.mark.parametrize("norm", list(LossNorm))
def test_an_update_weighs_as_a_batch_of_its_own(norm: LossNorm) -> None:
    """With a weight of 1 / tokens, or 1 / episodes, the weights of each update add up to 1."""
    rows = make_rows(9)
    layout = lay_out(rows, norm=norm, updates=2, ranks=1, multiple=1, seed=(0, 4))
    tokens = sum(row.trained for row in rows)
    for part in (layout.order[: layout.size], layout.order[layout.size :]):
        here = [index for index in part if index is not None]
        if norm is LossNorm.TOKEN_MEAN:
            total = sum(rows[index].trained * layout.scales[index] for index in here) / tokens
        else:
            total = sum({rows[index].episode: layout.scales[index] for index in here}.values()) / 9
        assert total == pytest.approx(1.0)


def test_fewer_episodes_than_updates_make_fewer_updates() -> None:
    rows = [BatchRow("a", 12, 2), BatchRow("a", 13, 3)]
    layout = lay_out(rows, norm=LossNorm.TOKEN_MEAN, updates=4, ranks=1, multiple=1, seed=(0, 0))
    assert (layout.size, layout.scales) == (2, [1.0, 1.0])
