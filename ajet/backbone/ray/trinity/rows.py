"""Episodes as Trinity's experiences: one per linear sample, with what credit needs in its `info`.

`info` travels through Trinity's queue or SQL store with the tokens. Everything in it is JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ajet.backbone.ray.credit import (
    GROUP,
    LEAF,
    ROWLESS,
    SEGMENTS,
    SUMMARY,
    group_tag,
    rowless_tag,
    segments_of,
    summary_of,
)
from ajet.schema.episode import Episode, EpisodeGroup, Sample

if TYPE_CHECKING:
    from trinity.common.experience import Experience

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
    """The experiences of one usable episode."""
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
                metrics={"reward": summary.reward, "success": float(bool(episode.is_success))},
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
    """Those of a complete group; an empty one if nothing of it can be trained, because its episodes count."""
    pairs = list(zip(group.episodes, samples, strict=True))
    rows = [row for episode, mine in pairs for row in experiences_of(episode, mine, uid=uid, span=span)]
    rows = rows or [empty_experience(group, uid=uid, span=span)]
    rows[0].info[ROWLESS] = rowless_tag([episode for episode, mine in pairs if not mine])
    return rows


def empty_experience(group: EpisodeGroup, *, uid: str, span: tuple[float, float]) -> Experience:
    """Stands for a group of which nothing is trained, and carries the reason. It leaves the batch before training."""
    import torch
    from trinity.common.experience import EID, Experience

    return Experience(
        eid=EID(),
        tokens=torch.zeros(2, dtype=torch.int64),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        metrics=_group_metrics(group),
        info={GROUP: group_tag(group), ROW: f"{uid}_0_0", SEGMENTS: [], VERSIONS: [], SPAN: list(span)},
    )


def tag_of(experience: Any) -> dict[str, Any]:
    """What `credit_batch` must know of a row."""
    info = experience.info
    tag = {name: info[name] for name in (SUMMARY, SEGMENTS, LEAF, ROWLESS) if name in info}
    return tag | {"response_len": len(experience.tokens) - experience.prompt_length}


def _group_metrics(group: EpisodeGroup) -> dict[str, float]:
    return {"incomplete_group": float(not group.complete)}
