"""Counting episodes: reasons, shares, and how old the policy was that sampled."""

from __future__ import annotations

import random

import pytest

from ajet.observe.episode_metrics import episode_metrics, staleness
from ajet.schema.episode import Episode
from support.synthetic_run import Vocabulary, math_episode


def episode(task: int = 0) -> Episode:
    return math_episode(Vocabulary(), random.Random(task), task=task)


def test_reasons_are_counted_by_token() -> None:
    one = episode()
    one.ledger.masked, one.ledger.dropped = {"not_trainable": 7}, {"timeout": 3}
    found = episode_metrics([one, one])
    assert found["masked/not_trainable"] == 14 and found["dropped/timeout"] == 6
    assert found[f"status/{one.status}"] == 2


def test_staleness_weighs_by_trained_tokens() -> None:
    one = episode()
    first, *others = one.tree.calls
    for call in others:
        call.mask[:] = False
    first.mask[:] = True
    half = len(first.mask) // 4
    first.versions = [(0, 3), (half, 5)]
    mean = 2 * half / len(first.mask)
    assert staleness([one], version=5) == {"train/staleness": pytest.approx(mean), "train/staleness/max": 2.0}
    first.mask[:half] = False
    assert staleness([one], version=5) == {"train/staleness": 0.0, "train/staleness/max": 0.0}, (
        "what is masked does not count"
    )
    first.mask[:] = False
    assert staleness([one], version=5) == {}
