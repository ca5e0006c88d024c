"""The credit of a whole batch, from what its rows' tags say. Pure: no verl, no Ray, no tensors.

Groups, statistics and weights are over episodes (`ajet.credit`), however many rows an episode came in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ajet.backbone.verl.rows import SUMMARY, token_credit
from ajet.credit import CreditSettings, EpisodeCredit, EpisodeSummary, compute_credit

Tag = Mapping[str, Any]


@dataclass(slots=True)
class BatchCredit:
    """What becomes of each row, in the order given."""

    dense: list[NDArray[np.float32]]
    """weight x advantage of each token of each row's response."""
    trained: list[bool]
    """Rows that are trained; the others leave the batch."""
    episodes: list[EpisodeCredit] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def credit_batch(
    keys: Sequence[str], tags: Sequence[Tag], settings: CreditSettings, *, sft: bool = False
) -> BatchCredit:
    """Credit for rows named `{group}_{episode}_{row}`.

    When no group of the batch teaches anything, its rows stay with advantage 0, because verl can't skip a step.
    """
    groups: dict[str, dict[str, EpisodeSummary]] = {}
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        members = groups.setdefault(group, {})
        if episode not in members:
            members[episode] = EpisodeSummary.from_json(json.loads(tag[SUMMARY]))
    credit = compute_credit([list(members.values()) for members in groups.values()], settings)
    by_id = {episode.episode_id: episode for episode in credit.episodes}
    dense, trained = [], []
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        mine = by_id[groups[group][episode].episode_id]
        dense.append(token_credit(tag, mine, int(tag["response_len"]), sft=sft))
        trained.append(not mine.skipped)
    if not any(trained):
        trained = [True] * len(trained)
    return BatchCredit(dense, trained, credit.episodes, credit.metrics)


def mini_batch(rows: int, *, group_size: int, updates: int, data_parallel: int) -> int:
    """verl's `ppo_mini_batch_size` for which these rows, padded, make exactly `updates` optimiser steps.

    verl multiplies it by the group size and wants whole mini-batches, each divisible among the data-parallel ranks.
    """
    unit = lcm(group_size, data_parallel)
    return -(-rows // (updates * unit)) * unit // group_size
