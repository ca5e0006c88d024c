"""`AjetAlgorithm`: what Trinity must know of an algorithm whose credit and loss are ours."""

from __future__ import annotations

from typing import Any

from trinity.algorithm.algorithm import AlgorithmType
from trinity.common.config import Config


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
    """The same without a KL term, and so without a second model in memory."""

    use_reference: bool = False

    @classmethod
    def check_config(cls, config: Config) -> None:
        if config.algorithm.kl_loss_fn != "none":
            raise ValueError("a KL term needs the algorithm with a reference model")
