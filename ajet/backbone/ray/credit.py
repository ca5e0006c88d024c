"""Credit for linear rows, as verl and Trinity train them. Pure: no verl, no Ray, no tensors.

A row's *tag* carries what credit needs: its episode's summary, and which call sampled which stretch of it. Tags are
small JSON, so the credit of a whole batch is computed without looking at its tokens. Groups, statistics and weights are
over episodes (`ajet.trainer.credit`), however many rows an episode has.

`lay_out` cuts a batch into mini-batches of whole episodes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ajet.schema.episode import Episode, Sample
from ajet.trainer.credit import (
    CreditSettings,
    EpisodeCredit,
    EpisodeSummary,
    LossNorm,
    compute_credit,
    imitation_credit,
    mini_batches,
    summarise,
)

Tag = Mapping[str, Any]

SUMMARY = "ajet_episode"
"""Tag of an episode's rows: its summary. Absent where a row stands for a whole group that has none."""
SEGMENTS = "ajet_segments"
"""Tag of a row: which stretch of its response was sampled by which call and is trained in it."""
LEAF = "ajet_leaf"
"""Tag of a row: the call that its path leads to, even if the row was cut before it."""
PLACE = "ajet_place"
"""Tag of a verl row: its task's place among the run's. Rows come as their groups end, and mini-batches are drawn by
their order."""
ROWLESS = "ajet_rowless"
"""Tag of a group's first row: summaries of the group's episodes that have no row. They count in the baseline."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of trained tokens of one call in a row's response."""

    call: int
    start: int
    end: int


def segments_of(sample: Sample) -> list[Segment]:
    """Maximal stretches of trained tokens of one call."""
    call_at = np.where(sample.response_mask, sample.call_of_token, -1)
    edges = np.flatnonzero(np.diff(np.concatenate(([-2], call_at, [-2]))))
    return [Segment(int(call_at[start]), int(start), int(end)) for start, end in pairwise(edges) if call_at[start] >= 0]


def summary_of(episode: Episode, samples: Sequence[Sample]) -> EpisodeSummary:
    """The episode's summary, counting only the tokens that its rows train.

    A row cut at the length limit loses tokens that the tree still has; a call's leaves are those of the rows it is in.
    """
    summary = summarise(episode)
    trained: Counter[int] = Counter()
    leaves: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        in_row: Counter[int] = Counter()
        for segment in segments_of(sample):
            in_row[segment.call] += segment.end - segment.start
        for index, count in in_row.items():
            trained[index] = max(trained[index], count)
            leaves[index].append(sample.leaf)
    for index, call in enumerate(summary.calls):
        call.spared += call.tokens - trained[index]
        call.tokens = trained[index]
        call.leaves = leaves[index]
    return summary


def in_order(keys: Sequence[str], places: Sequence[int]) -> list[int]:
    """Which row comes first, second, …: by its group's place, its episode and its own number, as on `local`."""
    return sorted(range(len(keys)), key=lambda at: (places[at], *map(int, keys[at].rsplit("_", 2)[1:])))


def rowless_tag(episodes: Sequence[Episode]) -> str:
    """`ROWLESS`, of a group's episodes without rows."""
    return json.dumps([summary_of(episode, []).to_json() for episode in episodes])


@dataclass(slots=True)
class BatchCredit:
    """The credit of each row, in the order given."""

    advantages: list[NDArray[np.float32]]
    """The advantage of each token of each row's response."""
    weights: list[NDArray[np.float32]]
    """The weight of each of them; 0 where a token is not trained."""
    trained: list[bool]
    """Whether a row is trained; the others leave the batch."""
    episodes: list[EpisodeCredit] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def credit_batch(
    keys: Sequence[str], tags: Sequence[Tag], settings: CreditSettings, *, imitate_from: float | None = None
) -> BatchCredit:
    """Credit for rows named `{group}_{episode}_{row}`. A row without a summary stands for a group of which no episode
    has a row, or which is left out as incomplete.

    `imitate_from`: supervised fine-tuning on the episodes with at least this reward. If no row of the batch has a
    gradient, those of episodes stay with weight 0, because verl can't skip a step; without any, those without a
    summary.
    """
    groups: dict[str, dict[str, EpisodeSummary]] = {}
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        members = groups.setdefault(group, {})
        if SUMMARY in tag and episode not in members:
            members[episode] = EpisodeSummary.from_json(json.loads(tag[SUMMARY]))
        for rowless in map(EpisodeSummary.from_json, json.loads(tag.get(ROWLESS, "[]"))):
            members[f"rowless {rowless.episode_id}"] = rowless
    summaries = [list(members.values()) for members in groups.values() if members]
    if imitate_from is None:
        credit = compute_credit(summaries, settings)
    else:
        chosen = [[episode for episode in group if episode.reward >= imitate_from] for group in summaries]
        credit = imitation_credit(chosen, settings)
    by_id = {episode.episode_id: episode for episode in credit.episodes}
    advantages, weights = [], []
    for key, tag in zip(keys, tags, strict=True):
        group, episode, _ = key.rsplit("_", 2)
        mine = by_id.get(groups[group][episode].episode_id) if SUMMARY in tag else None
        row_advantages, row_weights = token_credit(tag, mine, int(tag["response_len"]))
        advantages.append(row_advantages)
        weights.append(row_weights)
    trained = [bool(row.any()) for row in weights]
    if not any(trained):
        trained = [SUMMARY in tag for tag in tags]
    if not any(trained):
        trained = [True] * len(trained)
    return BatchCredit(advantages, weights, trained, credit.episodes, credit.metrics)


def token_credit(
    tag: Tag, credit: EpisodeCredit | None, length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Advantage and weight of each response token of a row.

    With `multiplicity` a token stands in several rows; in each it has the entry of that row's leaf.
    """
    advantages, weights = np.zeros(length, np.float32), np.zeros(length, np.float32)
    if credit is None:
        return advantages, weights
    segments = [Segment(*segment) for segment in tag[SEGMENTS]]
    calls = json.loads(tag[SUMMARY])["calls"]
    for segment in segments:
        entries = credit.calls[segment.call].entries
        if not entries:
            continue
        at = 0
        if len(entries) > 1:
            at = calls[segment.call]["leaves"].index(tag[LEAF])
        place = slice(segment.start, segment.end)
        advantages[place], weights[place] = entries[at]
    return advantages, weights


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The properties of a row that the layout needs."""

    episode: str
    length: int
    """Tokens, the prompt's included."""
    trained: int
    """Tokens with a weight."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The positions of a batch's rows."""

    order: list[int | None]
    """The index of the row at each position; None: a padding row that trains nothing."""
    scales: list[float]
    """The factor for each row's weights, in the order of the rows."""
    size: int
    """Rows of one update, on all ranks."""


def lay_out(
    rows: Sequence[BatchRow], *, norm: LossNorm, updates: int, ranks: int, multiple: int, seed: Sequence[int]
) -> RowLayout:
    """Assign rows to positions on so many data-parallel ranks. The number of rows in an update is a multiple of
    `multiple`."""
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
    return RowLayout(order, scales, size)
