"""Episodes as verl's rows: one row for each linear sample, everything credit needs beside them in the rows' tags.

Tags are small and travel apart from the tensors, so the driver can compute the credit of a whole batch without fetching
a token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ajet.credit import EpisodeCredit, EpisodeSummary, summarise
from ajet.schema.episode import Episode, EpisodeGroup
from ajet.schema.sample import Sample

if TYPE_CHECKING:
    import torch

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


@dataclass(slots=True)
class Row:
    """One row as verl stores it."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


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


def rows_of(episode: Episode, samples: Sequence[Sample], *, uid: str, step: int) -> list[Row]:
    """The rows of one episode."""
    import torch

    summary = json.dumps(summary_of(episode, samples).to_json())
    rows = []
    for index, sample in enumerate(samples):
        prompt = torch.from_numpy(sample.prompt_ids.astype(np.int64))
        response = torch.from_numpy(sample.response_ids.astype(np.int64))
        mask = torch.from_numpy(sample.response_mask.astype(np.int64))
        versions = sample.versions[sample.versions >= 0]
        fields = {
            "prompts": prompt,
            "responses": response,
            "input_ids": torch.cat([prompt, response]),
            "position_ids": torch.arange(len(prompt) + len(response)),
            "response_mask": mask,
            "loss_mask": mask,
            "rollout_log_probs": torch.from_numpy(sample.logprobs.astype(np.float32)),
            "rm_scores": torch.zeros(len(response), dtype=torch.float32),
            "uid": uid,
            "session_id": episode.repeat,
            "num_turns": len(episode.tree.calls),
            "multi_modal_inputs": {},
            "data_source": "ajet",
            "reward_model": {"ground_truth": None},
            "extra_fields": {"reward_extra_info": reward_info(episode)},
        }
        tag = {
            "status": "success",
            "prompt_len": len(prompt),
            "response_len": len(response),
            "seq_len": len(prompt) + len(response),
            "global_steps": step,
            "min_global_steps": int(versions.min()) if len(versions) else step,
            "max_global_steps": int(versions.max()) if len(versions) else step,
            SUMMARY: summary,
            SEGMENTS: [(segment.call, segment.start, segment.end) for segment in segments_of(sample)],
        }
        rows.append(Row(f"{uid}_{episode.repeat}_{index}", fields, tag))
    return rows


def validation_row(episode: Episode, samples: Sequence[Sample], *, uid: str, step: int) -> Row:
    """One row that stands for a validation episode: its last sample, with the reward on the last token."""
    import torch

    if not samples:
        nothing = np.zeros(1, np.int32)
        samples = [
            Sample(
                episode.episode_id,
                "",
                nothing,
                nothing,
                np.zeros(1, np.bool_),
                np.zeros(1, np.float32),
                np.full(1, -1, np.int32),
                np.full(1, -1, np.int32),
            )
        ]
    if episode.usable:
        row = rows_of(episode, samples[-1:], uid=uid, step=step)[0]
    else:
        failed = Episode(**{**_fields(episode), "reward": 0.0})
        row = rows_of(failed, samples[-1:], uid=uid, step=step)[0]
        row.fields["extra_fields"] = {"reward_extra_info": reward_info(episode)}
    scores = torch.zeros(len(row.fields["responses"]), dtype=torch.float32)
    scores[-1] = 0.0 if episode.reward is None else float(episode.reward)
    row.fields["rm_scores"] = scores
    row.key = f"{uid}_{episode.repeat}_0"
    return row


def _fields(episode: Episode) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in Episode.__dataclass_fields__}


def reward_info(episode: Episode) -> dict[str, float]:
    """What verl averages in a validation. `acc` counts a failed episode as no success."""
    return {
        "acc": float(bool(episode.is_success)),
        "true_reward": 0.0 if episode.reward is None else float(episode.reward),
        "failed": float(not episode.usable),
    }


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


def nested(rows: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """Rows of different lengths, as verl stores them."""
    import torch

    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)
