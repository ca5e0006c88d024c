"""`AjetCredit`: the credit of a whole batch, computed where Trinity computes advantages that need groups.

Each token gets its advantage and its weight. Weights are over the batch's episodes and the loss is a plain sum, so an
episode keeps its total weight, however many rows it gave and whether or not all of them are trained in the same step.
"""

from __future__ import annotations

import uuid
from typing import Any

import ray
import torch
from trinity.algorithm.advantage_fn.advantage_fn import AdvantageFn
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.experience import Experience

from ajet.backbone.ray.collector import COLLECTOR
from ajet.backbone.ray.credit import GROUP, ROWLESS, BatchCredit, credit_batch
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.trinity.rows import BATCH, ROW, SPAN, tag_of
from ajet.backbone.ray.trinity.workflow import step_of
from ajet.backbone.training_settings import credit_settings
from ajet.config import Config
from ajet.schema.errors import AjetError


class NothingUsableError(AjetError):
    """No group of a step has enough usable episodes."""


class AjetCredit(AdvantageFn, ExperienceOperatorV1):  # type: ignore[misc]
    """Built by Trinity in the process of its experience pipeline."""

    def __init__(self, payload: str) -> None:
        self._config = RunPayload.decode(payload).load_config()

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """All experiences of one batch of the explorer."""
        if not exps:
            return [], {}
        step = step_of(exps[0].eid.batch)
        groups = list(dict.fromkeys(exp.info[ROW].rsplit("_", 2)[0] for exp in exps))
        rows, credit = credited(exps, self._config, step)
        added = credit.metrics | _span(exps) | {"train/rows": float(len(rows))}
        await ray.get_actor(COLLECTOR).end_step.remote(step, groups, credit.episodes, False, added)
        return rows, {}

    def __call__(self, exps: Any, **_: Any) -> Any:
        raise NotImplementedError("computed in the pipeline, not in the trainer")

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def credited(exps: list[Experience], config: Config, step: int) -> tuple[list[Experience], BatchCredit]:
    """The experiences that are trained, with their credit: advantages, and weights where Trinity has returns."""
    algorithm = config.ajet.trainer_common.algorithm
    imitate_from = algorithm.sft.min_reward if algorithm.policy_loss == "sft" else None
    rows = [exp for exp in exps if GROUP not in exp.info or ROWLESS in exp.info]
    if not rows:
        reasons = [exp.info[GROUP]["failure"] for exp in exps]
        reason = next((reason for reason in reasons if reason), "unknown")
        raise NothingUsableError(f"step {step}: no group has enough usable episodes; the first failed: {reason}")
    credit = credit_batch(
        [exp.info[ROW] for exp in rows],
        [tag_of(exp) for exp in rows],
        credit_settings(config),
        imitate_from=imitate_from,
    )
    kept = []
    for exp, advantages, weights, trained in zip(rows, credit.advantages, credit.weights, credit.trained, strict=True):
        if trained:
            exp.advantages, exp.returns = torch.from_numpy(advantages), torch.from_numpy(weights)
            kept.append(exp)
    name = uuid.uuid4().hex
    for exp in kept:
        exp.info[BATCH] = [name, len(kept)]
    return kept, credit


def _span(exps: list[Experience]) -> dict[str, float]:
    """When this batch's rollout began and ended: shows whether it overlapped with training."""
    spans = [exp.info[SPAN] for exp in exps]
    return {
        "time/rollout_began": min(begin for begin, _ in spans),
        "time/rollout_ended": max(end for _, end in spans),
    }
