"""Episodes as verl's rows, or as Trinity's experiences: one per linear sample, with what credit needs beside it.

verl's tags travel apart from the tensors, so the credit of a whole batch is computed without fetching a token.
Trinity's `info` travels through its queue or SQL store with the tokens. Everything in it is JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ajet.backbone.metrics import is_success
from ajet.backbone.ray.credit import (
    LEAF,
    ROWLESS,
    SEGMENTS,
    SUMMARY,
    in_order,
    rowless_tag,
    segments_of,
    summary_of,
)
from ajet.schema.episode import Episode, EpisodeGroup, Sample

if TYPE_CHECKING:
    import torch
    from trinity.common.experience import Experience


WEIGHTS = "ajet_weights"
"""Field of a row: the weight of each of its response's tokens in the loss."""


@dataclass(slots=True)
class Row:
    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def rows_of(episode: Episode, samples: Sequence[Sample], *, uid: str, step: int, threshold: float = 1.0) -> list[Row]:
    summary = json.dumps(summary_of(episode, samples).to_json())
    rows = []
    for index, sample in enumerate(samples):
        row = _row(f"{uid}_{episode.repeat}_{index}", sample, step=step)
        row.fields |= {
            "uid": uid,
            "session_id": episode.repeat,
            "num_turns": len(episode.tree.calls),
            "extra_fields": {"reward_extra_info": reward_info(episode, threshold)},
        }
        row.tag |= {
            **version_span(sample, step),
            SUMMARY: summary,
            SEGMENTS: [(segment.call, segment.start, segment.end) for segment in segments_of(sample)],
            LEAF: sample.leaf,
        }
        rows.append(row)
    return rows


def group_rows(
    group: EpisodeGroup, samples: Sequence[Sequence[Sample]], *, step: int, threshold: float = 1.0
) -> list[Row]:
    """The rows of a complete group; a blank one if nothing of it can be trained, because its episodes count."""
    pairs = list(zip(group.episodes, samples, strict=True))
    about: dict[str, Any] = {"uid": group.group_id, "step": step, "threshold": threshold}
    rows = [row for episode, mine in pairs for row in rows_of(episode, mine, **about)]
    rows = rows or [stand_in(group.group_id, step=step)]
    rows[0].tag[ROWLESS] = rowless_tag([episode for episode, mine in pairs if not mine])
    return rows


def stand_in(name: str, *, step: int) -> Row:
    """The row of a group of which nothing is trained. Its token counts as sampled, because verl's figures need one."""
    row = blank_row(name, step=step)
    row.fields["response_mask"] = row.fields["loss_mask"] = row.fields["response_mask"].new_ones(1)
    return row


def blank_row(name: str, *, step: int) -> Row:
    """A row that trains nothing."""
    row = _row(f"{name}_0_0", empty_sample(name), step=step)
    row.fields |= {"uid": name, "session_id": 0, "num_turns": 0, "extra_fields": {"reward_extra_info": {}}}
    row.tag |= {"min_global_steps": step - 1, "max_global_steps": step - 1}  # as if the step's own weights had drawn it
    return row


def _row(key: str, sample: Sample, *, step: int) -> Row:
    import torch

    numbers = (sample.prompt_ids, sample.response_ids, sample.response_mask)
    prompt, response, response_mask = (torch.from_numpy(column.astype(np.int64)) for column in numbers)
    fields = {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(len(prompt) + len(response)),
        "response_mask": response_mask,
        "loss_mask": response_mask,
        "rollout_log_probs": torch.from_numpy(sample.logprobs.astype(np.float32)),
        "rm_scores": torch.zeros(len(response), dtype=torch.float32),
        WEIGHTS: torch.zeros(len(response), dtype=torch.float32),
        "multi_modal_inputs": {},
        "data_source": "ajet",
        "reward_model": {"ground_truth": None},
    }
    tag = {
        "status": "success",
        "prompt_len": len(prompt),
        "response_len": len(response),
        "seq_len": len(prompt) + len(response),
        "global_steps": step,
    }
    return Row(key, fields, tag)


def validation_row(episode: Episode, samples: Sequence[Sample], *, uid: str, step: int, threshold: float = 1.0) -> Row:
    """One row that stands for a validation episode: its last sample, with the reward on the last token."""
    import torch

    samples = samples or [empty_sample(episode.episode_id)]
    counted = episode if episode.usable else replace(episode, reward=0.0)
    row = rows_of(counted, samples[-1:], uid=uid, step=step, threshold=threshold)[0]
    row.fields["extra_fields"] = {"reward_extra_info": reward_info(episode, threshold)}
    scores = torch.zeros(len(row.fields["responses"]), dtype=torch.float32)
    scores[-1] = 0.0 if episode.reward is None else float(episode.reward)
    row.fields["rm_scores"] = scores
    return row


def empty_sample(episode_id: str) -> Sample:
    """Stands for an episode of which nothing can be trained."""
    zero, nowhere = np.zeros(1, np.int32), np.full(1, -1, np.int32)
    no_mask, no_logprobs = zero.astype(np.bool_), zero.astype(np.float32)
    return Sample(episode_id, "", zero, zero, no_mask, no_logprobs, nowhere, nowhere)


def version_span(sample: Sample, step: int) -> dict[str, int]:
    """The oldest and the newest weights that sampled it, as verl names them."""
    known = [int(version) for version in sample.versions if version >= 0]
    return {"min_global_steps": min(known, default=step), "max_global_steps": max(known, default=step)}


def reward_info(episode: Episode, threshold: float) -> dict[str, float]:
    """What verl averages in a validation. `acc` counts a failed episode as no success, and `threshold` as the metrics
    do."""
    return {
        "acc": float(episode.usable and is_success(episode, threshold)),
        "true_reward": 0.0 if episode.reward is None else float(episode.reward),
        "failed": float(not episode.usable),
    }


def nested(rows: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    """Rows of different lengths, as verl stores them."""
    import torch

    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


ROW = "ajet_row"
"""`{group}_{episode}_{row}`, as `credit_batch` names rows."""
VERSIONS = "ajet_versions"
"""[(policy version, trained tokens drawn under it), …]."""
BATCH = "ajet_batch"
"""(name of the batch whose credit was computed together, its number of rows)."""
SPAN = "ajet_span"
"""(begin, end) of the group's rollout, in seconds since the epoch."""
AGENT = "ajet_agent"
UPDATES = "ajet_updates"
"""How many updates the batch that is read makes."""


def experiences_of(
    episode: Episode, samples: Sequence[Sample], *, uid: str, span: tuple[float, float]
) -> list[Experience]:
    import torch
    from trinity.common.experience import EID, Experience

    summary = summary_of(episode, samples)
    facts = json.dumps(summary.to_json())
    rows = []
    for index, sample in enumerate(samples):
        versions = Counter(sample.versions[sample.response_mask].tolist())
        rows.append(
            Experience(
                eid=EID(run=episode.repeat, step=index),
                tokens=torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64)),
                prompt_length=len(sample.prompt_ids),
                logprobs=torch.from_numpy(sample.logprobs.astype(np.float32)),
                action_mask=torch.from_numpy(sample.response_mask.astype(np.bool_)),
                reward=summary.reward,
                metrics={"reward": summary.reward},
                info={
                    ROW: f"{uid}_{episode.repeat}_{index}",
                    SUMMARY: facts,
                    SEGMENTS: [[part.call, part.start, part.end] for part in segments_of(sample)],
                    LEAF: sample.leaf,
                    VERSIONS: sorted([int(version), count] for version, count in versions.items()),
                    AGENT: sample.agent,
                    SPAN: list(span),
                },
            )
        )
    return rows


def group_experiences(
    group: EpisodeGroup, samples: Sequence[Sequence[Sample]], *, uid: str, span: tuple[float, float]
) -> list[Experience]:
    """The experiences of a complete group; an empty one if nothing of it can be trained, because its episodes count."""
    pairs = list(zip(group.episodes, samples, strict=True))
    rows = [row for episode, mine in pairs for row in experiences_of(episode, mine, uid=uid, span=span)]
    rows = rows or [empty_experience(group, uid=uid, span=span)]
    rows[0].info[ROWLESS] = rowless_tag([episode for episode, mine in pairs if not mine])
    return rows


def empty_experience(group: EpisodeGroup, *, uid: str, span: tuple[float, float]) -> Experience:
    """Stands for a group of which nothing is trained. It leaves the batch if anything else of it is."""
    import torch
    from trinity.common.experience import EID, Experience

    return Experience(
        eid=EID(),
        tokens=torch.zeros(2, dtype=torch.int64),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        metrics={"incomplete_group": float(not group.complete)},
        info={ROW: f"{uid}_0_0", SEGMENTS: [], VERSIONS: [], SPAN: list(span)},
    )


def ordered(experiences: Sequence[Any]) -> list[Any]:
    """Order them by their task's place in the batch, which Trinity's runner notes; see `in_order`."""
    names = [experience.info[ROW] for experience in experiences]
    return [experiences[at] for at in in_order(names, [int(one.eid.task or 0) for one in experiences])]


def tag_of(experience: Any) -> dict[str, Any]:
    """What `credit_batch` must know of a row."""
    info = experience.info
    tag = {name: info[name] for name in (SUMMARY, SEGMENTS, LEAF, ROWLESS) if name in info}
    return tag | {"response_len": len(experience.tokens) - experience.prompt_length}
