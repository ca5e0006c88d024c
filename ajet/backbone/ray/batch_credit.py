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

from ajet.backbone.ray.row_credit import SUMMARY, token_credit
from ajet.credit import CreditSettings, EpisodeCredit, EpisodeSummary, compute_credit, imitation_credit

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
    keys: Sequence[str], tags: Sequence[Tag], settings: CreditSettings, *, imitate_from: float | None = None
) -> BatchCredit:
    """Credit for rows named `{group}_{episode}_{row}`.

    `imitate_from`: supervised fine-tuning on the episodes with at least this reward. When nothing in the batch teaches
    anything, its rows stay with advantage 0, because verl can't skip a step.
    """
    groups: dict[str, dict[str, EpisodeSummary]] = {}
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        members = groups.setdefault(group, {})
        if episode not in members:
            members[episode] = EpisodeSummary.from_json(json.loads(tag[SUMMARY]))
    summaries = [list(members.values()) for members in groups.values()]
    if imitate_from is None:
        credit = compute_credit(summaries, settings)
    else:
        chosen = [[episode for episode in group if episode.reward >= imitate_from] for group in summaries]
        credit = imitation_credit(chosen, settings)
    by_id = {episode.episode_id: episode for episode in credit.episodes}
    dense, trained = [], []
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        mine = by_id.get(groups[group][episode].episode_id)
        length = int(tag["response_len"])
        dense.append(np.zeros(length, np.float32) if mine is None else token_credit(tag, mine, length))
        trained.append(mine is not None and not mine.skipped)
    if not any(trained):
        trained = [True] * len(trained)
    return BatchCredit(dense, trained, credit.episodes, credit.metrics)


def mini_batch(rows: int, *, group_size: int, updates: int, data_parallel: int) -> int:
    """verl's `ppo_mini_batch_size` for which these rows, padded, make exactly `updates` optimiser steps.

    verl multiplies it by the group size and wants whole mini-batches, each divisible among the data-parallel ranks.
    """
    unit = lcm(group_size, data_parallel)
    return -(-rows // (updates * unit)) * unit // group_size
