"""The correction for a sampler that differs from the trainer: a factor on each token's weight.

The ratio is π_old / π_sampler, the trainer's probability of a token over the engine's, both before the update. For a
trajectory it is the product over its tokens.

Shapes: E edges, T trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Log ratios count as at most this: exp of a long trajectory's sum would overflow."""


class CorrectionMode(StrEnum):
    """What the ratio does to the weight."""

    TOKEN_TIS = "token_tis"
    """min(ratio of the token, cap)."""
    SEQUENCE_TIS = "sequence_tis"
    """min(ratio of the trajectory, cap)."""
    MASKED = "masked"
    """The ratio itself within [low, high], and 0 outside."""


class Level(StrEnum):
    """Whose ratio `masked` looks at."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Correction:
    """A mode with its bounds."""

    mode: CorrectionMode = CorrectionMode.TOKEN_TIS
    cap: float = 2.0
    level: Level = Level.TOKEN
    low: float = 0.5
    high: float = 5.0

    @property
    def by_trajectory(self) -> bool:
        """Whether it needs the whole trajectory, which may be spread over several packs."""
        return self.mode is CorrectionMode.SEQUENCE_TIS or (
            self.mode is CorrectionMode.MASKED and self.level is Level.SEQUENCE
        )

    def factors(self, log_ratio_E: Tensor, trajectory_E: Tensor, log_ratio_T: Tensor | None) -> Tensor:
        """The factor of each edge. `log_ratio_T`: each trajectory's sum; None if all are whole among these edges."""
        if self.by_trajectory:
            if log_ratio_T is None:
                count = int(trajectory_E.max()) + 1
                log_ratio_T = log_ratio_E.new_zeros(count).index_add_(0, trajectory_E, log_ratio_E)
            log_ratio_E = log_ratio_T[trajectory_E]
        ratio_E = log_ratio_E.clamp(max=MOST_LOG_RATIO).exp()
        if self.mode is not CorrectionMode.MASKED:
            return ratio_E.clamp(max=self.cap)
        kept_E = (ratio_E >= self.low) & (ratio_E <= self.high)
        return torch.where(kept_E, ratio_E, torch.zeros_like(ratio_E))
