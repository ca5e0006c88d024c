"""What credit needs beside a row's tokens: its episode's summary, and which stretch of it which call sampled.

A row is one linear sample, as verl and Trinity train them. All of this is small and JSON, so the credit of a whole
batch can be computed without looking at a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ajet.credit import EpisodeCredit, EpisodeSummary, summarise
from ajet.schema.call_tree import Sample
from ajet.schema.episode import Episode, EpisodeGroup

SUMMARY = "ajet_episode"
"""Tag of an episode's rows: its summary."""
SEGMENTS = "ajet_segments"
"""Tag of a row: which stretch of its response which call sampled and is trained in it."""
GROUP = "ajet_group"
"""Tag of a prompt: what became of its group."""


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
    """The episode's summary, counting the tokens that its rows really train.

    A row cut at the length limit loses tokens that the tree still has; weights must count what is trained.
    """
    summary = summarise(episode)
    trained: Counter[int] = Counter()
    for sample in samples:
        rows: Counter[int] = Counter()
        for segment in segments_of(sample):
            rows[segment.call] += segment.end - segment.start
        for index, count in rows.items():
            trained[index] = max(trained[index], count)
    for index, call in enumerate(summary.calls):
        call.tokens = trained[index]
    return summary


def group_tag(group: EpisodeGroup) -> dict[str, Any]:
    """What the driver is told of a group, beside its rows."""
    failures = (episode.failure for episode in group.failed if episode.failure is not None)
    return {
        "complete": group.complete,
        "failure": next((f"{failure.kind}: {failure.message}" for failure in failures), ""),
    }


def token_credit(tag: Mapping[str, Any], credit: EpisodeCredit, length: int) -> NDArray[np.float32]:
    """weight x advantage of each response token of a row.

    With `multiplicity` a token stands in several rows; in each it has the entry of that row's leaf, its last call.
    """
    dense = np.zeros(length, np.float32)
    segments = [Segment(*segment) for segment in tag[SEGMENTS]]
    leaves = {call.index: call.leaves for call in _calls(tag)}
    for segment in segments:
        entries = credit.calls[segment.call].entries
        if not entries:
            continue
        at = 0
        if len(entries) > 1:
            at = leaves[segment.call].index(segments[-1].call)
        advantage, weight = entries[at]
        dense[segment.start : segment.end] = weight * advantage
    return dense


@dataclass(frozen=True, slots=True)
class _Leaves:
    index: int
    leaves: list[int]


def _calls(tag: Mapping[str, Any]) -> list[_Leaves]:
    return [_Leaves(index, call["leaves"]) for index, call in enumerate(json.loads(tag[SUMMARY])["calls"])]
