"""`ajet.failure_reward`: what becomes of episodes that did not end well."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section
from ajet.config.types import Real

Treatment = Real | Literal["judge", "drop"]


class FailureRewardConfig(Section):
    """`ajet.failure_reward`: a number (train with this reward), `judge` (train with the judge's or the workflow's) or
    `drop` (do not train).
    """

    workflow_error: Real | Literal["drop"] = "drop"
    """The workflow raised, or returned something else than a WorkflowOutput."""
    timeout: Real | Literal["drop"] = "drop"
    """`rollout.episode_timeout` ran out."""
    truncated: Treatment = "judge"
    """A reply was cut by its length, or `multi_turn.max_steps` was used up."""
    overflow: Treatment = "judge"
    """A prompt left no room in `rollout.max_model_len`."""
    abnormal: Treatment = -1.0
    """A check of `rollout.compute_madness_checklist` failed."""
