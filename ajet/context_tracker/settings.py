"""`TrackerSettings`: what a context tracker needs to know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ReasoningHistory = Literal["template", "keep"]
AbandonedCalls = Literal["mask", "train"]
SharedTokenLoss = Literal["once", "multiplicity"]


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """Limits and rules of a run, the same for all its episodes."""

    max_model_len: int = 18000
    """Prompt + reply of one call."""
    max_prompt_length: int = 3000
    """Of a linear sample."""
    max_response_length: int = 15000
    """Of a linear sample."""
    max_response_length_in_one_turn: int = 4096
    max_steps: int = 30
    """Model calls per agent and episode."""
    max_sample_per_task: int = 30
    """Linear samples per episode."""
    reasoning_history: ReasoningHistory = "template"
    abandoned_calls: AbandonedCalls = "mask"
    shared_token_loss: SharedTokenLoss = "once"
    checks: tuple[str, ...] = ("nonsense",)
    """`compute_madness_checklist`."""
    terminate_on_abnormal: bool = True
    call_prefix: str = "call"
    """What the names of its calls begin with, and so the ids of replies: unique within the episode."""
    detect_forks: bool = True
    """Whether to explain each fork (`detect_timeline_snap`); this doesn't change the tree."""

    @classmethod
    def from_config(cls, config: Any) -> TrackerSettings:
        """Read a loaded `Config`."""
        data, rollout, tracker = config.ajet.data, config.ajet.rollout, config.ajet.context_tracker
        return cls(
            max_model_len=rollout.max_model_len,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            max_response_length_in_one_turn=rollout.max_response_length_in_one_turn,
            max_steps=rollout.multi_turn.max_steps,
            max_sample_per_task=rollout.multi_turn.max_sample_per_task,
            reasoning_history=rollout.reasoning_history,
            abandoned_calls=rollout.abandoned_calls,
            shared_token_loss=tracker.shared_token_loss,
            checks=tuple(rollout.compute_madness_checklist),
            terminate_on_abnormal=rollout.agent_madness_termination,
            detect_forks=tracker.detect_timeline_snap,
        )
