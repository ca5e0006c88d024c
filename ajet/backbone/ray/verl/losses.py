"""Our losses and our credit, registered with verl under their own names.

verl's batch carries weight x advantage for each token. Our policy losses are linear in that product (the sign of an
advantage decides which side clips, and weights are positive), so the embedded trainer's formula gives its gradient:
the sum over tokens of weight x token loss, whatever rows or micro-batches they came in.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ajet.backbone.ray.verl.config import ADVANTAGE_ESTIMATOR, POLICY_LOSS_PREFIX
from ajet.trainer.loss import EdgeTensors, LossSettings, PolicyLoss, policy_loss


def hand_through(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """verl's advantage estimator: the credit is already in the "rewards"."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


def row_loss(
    kind: PolicyLoss,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's policy loss for one micro-batch of padded rows. Names and arguments are verl's."""
    row_of, column_of = response_mask.bool().nonzero(as_tuple=True)
    at = (row_of, column_of)
    scale = config.global_batch_info.get("dp_size", 1)
    if not len(row_of):
        return log_prob.sum() * 0.0, {}
    count = len(row_of)
    weight = torch.ones(count, dtype=log_prob.dtype, device=log_prob.device)
    if kind is PolicyLoss.SFT:
        weight = advantages[at]
    elif rollout_is_weights is not None:
        weight = rollout_is_weights[at].to(log_prob.dtype)
    edges = EdgeTensors(
        sampler_E=old_log_prob[at],
        trajectory_E=row_of,
        entry_edge_M=torch.arange(count, device=log_prob.device),
        advantage_M=advantages[at].to(log_prob.dtype),
        weight_M=weight,
        old_E=old_log_prob[at],
    )
    settings = LossSettings(
        policy_loss=kind,
        clip_low=float(config.clip_ratio_low),
        clip_high=float(config.clip_ratio_high),
        clip_dual=float(config.clip_ratio_c),
        correction=None,  # verl computed the correction: `rollout_is_weights`
    )
    result = policy_loss(log_prob[at], edges, settings)
    # gradients are averaged over data-parallel ranks, and ours is a sum
    metrics = {
        f"actor/{name.replace('/sum', '')}": float(value) / count
        for name, value in result.sums.items()
        if name in ("clip_fraction/sum", "ratio/sum")
    }
    return result.loss * scale, metrics


def register() -> None:
    """Make them known to verl."""
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    register_adv_est(ADVANTAGE_ESTIMATOR)(hand_through)
    for kind in PolicyLoss:
        register_policy_loss(POLICY_LOSS_PREFIX + kind.value)(partial(row_loss, kind))
