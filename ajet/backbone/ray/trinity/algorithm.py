"""Our algorithm for Trinity: the embedded trainer's losses, as Trinity's trainer calls them.

Each token comes with its advantage and its weight; the loss, its KL and entropy terms included, is a sum over tokens,
whatever rows or micro-batches they came in, so it has the embedded trainer's gradient. The ratio is to the policy that
sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.algorithm import AlgorithmType
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import EntropyLossFn
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn

from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.training_settings import loss_settings
from ajet.trainer.loss import EdgeTensors, policy_loss

METRICS = {"policy/sum": "pg_loss", "kl/sum": "kl_loss", "clip_fraction/sum": "clip_fraction", "ratio/sum": "ratio"}
"""Our sums, and the names under which Trinity reports their means."""


class AjetAlgorithm(AlgorithmType):  # type: ignore[misc]
    """No critic; advantages are in the experiences; a reference model only if there is a KL term."""

    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: str = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        return {}


class AjetAlgorithmWithoutReference(AjetAlgorithm):
    """Without a KL term, and so without a second model in memory."""

    use_reference: bool = False


class _RowLoss:
    """What both losses share. A token's weight is where Trinity has returns, which nothing else here uses.

    `scale`: data-parallel ranks, because gradients are averaged over them.
    """

    def __init__(self, backend: str = "verl", *, payload: str, scale: float = 1.0) -> None:
        super().__init__(backend=backend)  # type: ignore[call-arg]
        # nothing to correct: the ratio is to the sampler itself
        self._settings = loss_settings(RunPayload.decode(payload).load_config())
        self._scale = scale

    def _loss(
        self, logprob: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, reference: Tensor | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        at = weights.nonzero(as_tuple=True)
        if not len(at[0]):
            return logprob.sum() * 0.0, {}
        edges = EdgeTensors(
            sampler_E=old[at],
            trajectory_E=at[0],
            entry_edge_M=torch.arange(len(at[0]), device=logprob.device),
            advantage_M=advantages[at].to(logprob.dtype),
            weight_M=weights[at].to(logprob.dtype),
            old_E=old[at],
            reference_E=None if reference is None else reference[at],
        )
        result = policy_loss(logprob[at], edges, self._settings)
        total = float(edges.weight_M.sum())
        metrics = {name: float(result.sums[ours]) / total for ours, name in METRICS.items() if ours in result.sums}
        return result.loss * self._scale, metrics

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


class AjetPolicyLoss(_RowLoss, PolicyLossFn):  # type: ignore[misc]
    """Without a KL term. Trinity hands over the fields that `__call__` names."""

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, returns: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """One micro-batch of padded rows."""
        return self._loss(logprob, old_logprob, advantages, returns)


class AjetPolicyLossWithReference(_RowLoss, PolicyLossFn):  # type: ignore[misc]
    """With a KL term."""

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
        ref_logprob: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """One micro-batch of padded rows."""
        return self._loss(logprob, old_logprob, advantages, returns, ref_logprob)


class AjetEntropy(EntropyLossFn):  # type: ignore[misc]
    """The entropy term, weighted like the loss; Trinity subtracts it."""

    def __init__(self, entropy_coef: float, scale: float = 1.0) -> None:
        self._coef = entropy_coef
        self._scale = scale

    def __call__(self, entropy: Tensor, action_mask: Tensor, **fields: Any) -> tuple[Tensor, dict[str, float]]:
        """One micro-batch of padded rows; `returns` are the tokens' weights."""
        weights = fields["returns"].to(entropy.dtype)
        total = (weights * entropy).sum()
        share = float(weights.sum())
        return self._coef * self._scale * total, {"entropy": float(total.detach()) / share} if share else {}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"entropy_coef": 0.0}
