"""One finished attempt at a task: its calls, its reward and how it ended. A failed episode is data, not a crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ajet.schema.call_tree import CallTree
from ajet.schema.ledger import Ledger


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The workflow returned and the reward is known."""
    TRUNCATED = "truncated"
    """The model's own doing ended it early (see `Outcome`); it has a reward and is trained."""
    WORKFLOW_ERROR = "workflow_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"


class Outcome(StrEnum):
    """What the model did that cut an episode short. Decides which `failure_reward` applies."""

    LENGTH = "length"
    """The last reply was cut by max tokens."""
    OVERFLOW = "overflow"
    """A prompt left no room in `max_model_len`."""
    MAX_STEPS = "max_steps"
    ABNORMAL = "abnormal"
    """An output check of `compute_madness_checklist` failed."""


@dataclass(slots=True)
class Failure:
    """Why an episode has no usable result."""

    kind: str
    """The exception's type name."""
    message: str
    traceback: str = ""


@dataclass(slots=True)
class Episode:
    """What the runner hands on, to credit, backbone and recorder."""

    episode_id: str
    task_id: str
    status: EpisodeStatus
    tree: CallTree
    ledger: Ledger
    group_id: str = ""
    """Episodes of one group (same task, same batch) are compared with each other."""
    repeat: int = 0
    tag: str = ""
    reward: float | None = None
    """None only when the episode failed."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of single agents, where they differ from the episode's."""
    is_success: bool | None = None
    outcomes: tuple[Outcome, ...] = ()
    failure: Failure | None = None
    attempts: int = 1
    """1 + retries after faults."""
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `total`, `model`, `judge`, `queue`."""

    @property
    def usable(self) -> bool:
        """Whether it may be trained."""
        return self.reward is not None


@dataclass(slots=True)
class EpisodeGroup:
    """The episodes of one task, to be compared with each other."""

    group_id: str
    task_id: str
    episodes: list[Episode]
    """The usable ones, at most `num_repeat`."""
    failed: list[Episode] = field(default_factory=list)
    complete: bool = True
    """False: fewer than `min_group_size` usable episodes after refilling. Never trained."""
