"""One finished run of the workflow on a task: its calls, its reward, how it ended, and its token ledger.

A failed episode is data, not a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ajet.schema.call_tree import CallTree
from ajet.schema.span import Span
from ajet.schema.traceback_text import user_line


class LedgerImbalance(AssertionError):
    """Tokens were lost or counted twice: a bug in ajet, never the user's fault."""


@dataclass(slots=True)
class Ledger:
    """Where every captured token went: captured = trained + masked + dropped. For one episode, or summed over many."""

    captured: int = 0
    trained: int = 0
    masked: dict[str, int] = field(default_factory=dict)
    """By reason (`not_trainable`, `abandoned`, …): kept in the tree, but without loss."""
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason (`response_too_long`, `too_many_samples`, …): not in any training sample."""

    def balance(self) -> None:
        """Raise unless every captured token is accounted for."""
        accounted = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        if accounted != self.captured:
            raise LedgerImbalance(f"captured {self.captured} tokens but accounted for {accounted}: {self}")

    def add(self, other: Ledger) -> None:
        """Add another ledger's counts to this one."""
        self.captured += other.captured
        self.trained += other.trained
        for mine, theirs in ((self.masked, other.masked), (self.dropped, other.dropped)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The workflow returned and the reward is known."""
    TRUNCATED = "truncated"
    """The model's own behaviour ended it early (see `Outcome`); it has a reward and is trained."""
    WORKFLOW_ERROR = "workflow_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"
    ENVIRONMENT_ERROR = "environment_error"
    """The environment could not be reached, or was lost, through no action of the model."""


class Outcome(StrEnum):
    """What the model did that cut an episode short; it decides which `failure_reward` applies."""

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

    @property
    def place(self) -> str:
        """The user's line at which it happened: `agent.py:17 in execute`. Empty if none took part."""
        return user_line(self.traceback)

    @property
    def in_short(self) -> str:
        """One line: kind, message and place."""
        message = self.message.strip().partition("\n")[0]
        place = f", at {self.place}" if self.place else ""
        return f"{self.kind}: {message}{place}"


@dataclass(slots=True)
class EnvironmentEvent:
    """One thing asked of an environment: `reset`, `step`, `evaluate` or `close`."""

    what: str
    started_s: float = 0.0
    """Seconds since the episode's environment was asked for."""
    seconds: float = 0.0
    reward: float | None = None
    done: bool = False
    action: str = ""
    """The beginning of it, as text."""
    observation: str = ""
    """The beginning of it, as text."""
    error: str = ""
    """Why it failed."""


@dataclass(slots=True)
class EnvironmentRecord:
    """What an episode's environment was asked, in order."""

    name: str
    """As in the YAML: a class, `gymnasium:ID`, or the address of a service."""
    events: list[EnvironmentEvent] = field(default_factory=list)
    left_out: int = 0
    """Further steps, beyond those that are kept."""
    began: float = 0.0
    """When it was asked for, in seconds since 1970: `EnvironmentEvent.started_s` counts from here. 0: unknown."""


@dataclass(slots=True)
class Episode:
    """What the runner passes on to credit, backbone and recorder."""

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
    """Rewards of individual agents that differ from the episode's."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the judge made the reward of, by name, before weighting. Empty if it gave one number."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """The weight of each part."""
    is_success: bool | None = None
    outcomes: tuple[Outcome, ...] = ()
    failure: Failure | None = None
    attempts: int = 1
    """1 + retries after faults."""
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: `total`, `model`, `judge`, `queue`."""
    environment: EnvironmentRecord | None = None
    """What its environment was asked; None without an environment."""
    prompt_version: str = ""
    """Version of the prompt templates that it was given; empty if there are none."""
    prompts_used: list[str] | None = None
    """The templates that its workflow asked for; None if that isn't known."""
    began: float = 0.0
    """When its first call could be made, in seconds since 1970: `Call.started_s` counts from here. 0: unknown."""
    spans: list[Span] = field(default_factory=list)
    """What its code, and programs that it used, told about it, in the order in which it arrived."""
    spans_left_out: int = 0
    """Further spans, beyond those that are kept."""

    @property
    def weights_version(self) -> int | None:
        """The newest version of the weights that sampled a token of it; None if none was sampled."""
        versions = [version for call in self.tree.calls for _, version in call.versions]
        return max(versions, default=None)

    @property
    def usable(self) -> bool:
        """Whether it has a reward: only then is it trained, and counted in means and success rates."""
        return self.reward is not None


@dataclass(slots=True)
class EpisodeGroup:
    """The episodes of one task, which are compared with each other."""

    group_id: str
    task_id: str
    episodes: list[Episode]
    """Those that make the group: usable, at most `num_repeat`."""
    failed: list[Episode] = field(default_factory=list)
    """All others: without a reward, or surplus of oversampling."""
    complete: bool = True
    """False: too few usable episodes (see `min_group_size`), or the judge failed. Never trained."""
