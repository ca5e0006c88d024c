"""Our algorithm for Trinity: the embedded trainer's losses, as Trinity's trainer calls them.

The batch carries weight x advantage for each token; the loss is their sum over tokens, whatever rows or micro-batches
they came in, so it has the embedded trainer's gradient. The ratio is to the policy that sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.algorithm import AlgorithmType
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.common.config import Config

from ajet.trainer.loss import EdgeTensors, LossSettings, PolicyLoss, policy_loss


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

    @classmethod
    def check_config(cls, config: Config) -> None:
        if config.algorithm.kl_loss_fn != "none":
            raise ValueError("a KL term needs the algorithm with a reference model")


class AjetPolicyLoss(PolicyLossFn):  # type: ignore[misc]
    """`scale`: data-parallel ranks (gradients are averaged over them) times the updates of a step."""

    def __init__(
        self,
        backend: str = "verl",
        *,
        kind: str = "ppo",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        clip_dual: float | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(backend=backend)
        self._settings = LossSettings(
            policy_loss=PolicyLoss(kind),
            clip_low=clip_low,
            clip_high=clip_high,
            clip_dual=clip_dual,
            correction=None,  # the ratio is to the sampler itself
        )
        self._scale = scale

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """One micro-batch of padded rows."""
        row_of, column_of = action_mask.bool().nonzero(as_tuple=True)
        at = (row_of, column_of)
        count = len(row_of)
        if not count:
            return logprob.sum() * 0.0, {}
        credit = advantages[at].to(logprob.dtype)
        imitates = self._settings.policy_loss is PolicyLoss.SFT
        edges = EdgeTensors(
            sampler_E=old_logprob[at],
            trajectory_E=row_of,
            entry_edge_M=torch.arange(count, device=logprob.device),
            advantage_M=credit,
            weight_M=credit if imitates else torch.ones_like(credit),
            old_E=old_logprob[at],
        )
        result = policy_loss(logprob[at], edges, self._settings)
        metrics = {
            name.removesuffix("/sum"): float(value) / count
            for name, value in result.sums.items()
            if name in ("clip_fraction/sum", "ratio/sum")
        }
        return result.loss * self._scale, metrics | {"pg_loss": float(result.loss.detach())}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}
