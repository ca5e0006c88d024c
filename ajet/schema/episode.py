"""`Episode`: one finished run of the workflow on a task; `CallTree`: its model calls as token runs, each stored once.

A failed episode is data, not a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ajet.schema.chat import FinishReason, Message, Sampling, Tool
from ajet.schema.errors import at_user_line, user_line
from ajet.schema.span import Span

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

ROOT = -1
"""Parent of a first run; `Run.call` of a context run; `Call.run` of a call that got no reply."""

DropReason = Literal[
    "abandoned",
    "not_trainable",
    "response_too_long",
    "prompt_too_long",
    "too_many_samples",
    "aborted",
    "failed_episode",
    "failure_reward",
]


@dataclass(slots=True)
class Run:
    """A contiguous run of tokens with one origin: context, or one sampled reply."""

    ids: IntArray
    parent: int
    start: int
    call: int = ROOT
    """Index in `CallTree.calls` of the call that sampled these tokens; ROOT for context."""


@dataclass(slots=True)
class Fork:
    """Why a call could not extend the call that its messages resemble most."""

    reason: str
    """One of the tracker's fork reasons, e.g. `message_changed`, `template_not_stable`, `tools_changed`."""
    nearest: int
    """The call that it almost extends."""
    detail: str = ""
    """The message and field that differ, or the template's rule that applies."""
    tokens: int = 0
    """Tokens that had to be rendered and prefilled again."""


@dataclass(slots=True)
class Call:
    """One model call: the agent that made it, the messages it added, and the reply."""

    name: str
    agent: str
    target: str
    turn: int
    """How many calls of the same conversation came before; 0 for the first call of a conversation or branch."""
    prompt_run: int
    """The context run in which the prompt ends."""
    prompt_tokens: int
    run: int = ROOT
    """The sampled run; ROOT while in flight, or when aborted."""
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    mask: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Which sampled tokens are trained. All False for a call that is context only."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    sampling: Sampling = field(default_factory=Sampling)
    trainable: bool = True
    drop: DropReason | None = None
    """Why none of its tokens is trained although it was sampled."""
    reward: float | None = None
    """A reward of its own (`tuner.reward(value, call=…)`, or one of a list), beside the agent's or the episode's."""
    replaces_outcome: bool = False
    """`tuner.reward(…, replace=True)`, or one of a list: its reward stands in for the agent's and the episode's."""
    extends: int = ROOT
    """The call whose prompt and reply this prompt continues."""
    new_messages: list[Message] = field(default_factory=list)
    """Messages that this call added to the call it extends (all of them, if it extends none)."""
    reply: Message = field(default_factory=dict)
    tools: int = ROOT
    """Index in `CallTree.toolsets`."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """The request's `chat_template_kwargs`."""
    fork: Fork | None = None
    started_s: float = 0.0
    """Seconds since the episode began."""
    seconds: float = 0.0
    experts: NDArray[np.int16] | None = None
    """With `rollout.routing_replay`: [token, layer, chosen], of the tokens of prompt and reply that the call it extends
    doesn't have. Not of the last one, which nothing was computed from. Not recorded in files."""
    reply_tokens: int = 0
    """For a reply without token ids: how many tokens its server counted."""

    @property
    def computed_tokens(self) -> int:
        """All tokens of prompt and reply but the last, from which nothing was drawn."""
        return self.prompt_tokens + len(self.logprobs) - 1

    def keep_experts(self, experts: NDArray[np.int16] | None, extended: Call | None) -> None:
        """Keep those of the computed tokens that the extended call doesn't have."""
        known = 0 if extended is None or extended.experts is None else extended.computed_tokens
        self.experts = None if experts is None else experts[known:]


@dataclass(slots=True)
class CallTree:
    """All runs and calls of one episode. In `runs`, parents come before their children."""

    runs: list[Run] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    toolsets: list[list[Tool]] = field(default_factory=list)

    def path(self, run: int) -> list[int]:
        """The runs from the root down to `run`."""
        path = []
        while run != ROOT:
            path.append(run)
            run = self.runs[run].parent
        return path[::-1]

    def path_ids(self, run: int) -> IntArray:
        """The token ids from the root to the end of `run`."""
        parts = [self.runs[index].ids for index in self.path(run)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def prompt_ids(self, call: int) -> IntArray:
        """What the engine was given for this call."""
        return self.path_ids(self.calls[call].prompt_run)[: self.calls[call].prompt_tokens]

    def experts_of(self, index: int) -> NDArray[np.int16] | None:
        """[token, layer, chosen] of a call's prompt and reply, but its last token. None if they weren't noted."""
        call = self.calls[index]
        if call.experts is None:
            return None
        parts = [call.experts]
        start = call.computed_tokens - len(call.experts)
        while start and (call := self.calls[call.extends]).experts is not None:
            first = call.computed_tokens - len(call.experts)
            parts.append(call.experts[: max(start - first, 0)])
            start = min(start, first)
        return np.concatenate(parts[::-1])

    def children(self) -> list[list[int]]:
        """The runs that continue each run."""
        children: list[list[int]] = [[] for _ in self.runs]
        for index, run in enumerate(self.runs):
            if run.parent != ROOT:
                children[run.parent].append(index)
        return children

    @property
    def tokens(self) -> int:
        """Unique tokens, context and sampled."""
        return sum(len(run.ids) for run in self.runs)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(run.ids) for run in self.runs if run.call != ROOT)

    @property
    def spent(self) -> tuple[int, int]:
        """Total prompt tokens and total reply tokens. Replies without token ids count as their server counted them."""
        replies = self.sampled_tokens + sum(call.reply_tokens for call in self.calls)
        return sum(call.prompt_tokens for call in self.calls), replies

    @property
    def trained_tokens(self) -> int:
        return sum(int(call.mask.sum()) for call in self.calls)


@dataclass(slots=True)
class Sample:
    """A training row for trainers that know only rows (verl, Trinity): one path from the root to a leaf.

    `prompt_ids` carry no loss; `response_*` are aligned with `response_ids`.
    """

    episode_id: str
    agent: str
    prompt_ids: IntArray
    response_ids: IntArray
    response_mask: BoolArray
    """True where a token was sampled, is trained, and is trained in this sample."""
    logprobs: FloatArray
    """The sampler's; 0.0 on context tokens."""
    call_of_token: IntArray
    """Index in the tree's calls of the call that sampled each response token, -1 for context: credit is per call."""
    versions: IntArray
    """Policy version of each response token, -1 for context."""
    leaf: int = ROOT
    """The call that this path leads to, even if the row was cut before it."""


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
        self.captured += other.captured
        self.trained += other.trained
        for mine, theirs in ((self.masked, other.masked), (self.dropped, other.dropped)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count


class EpisodeStatus(StrEnum):
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
        """The line of the user's code where it happened: `agent.py:17 in execute`. Empty if no user code was
        involved."""
        return user_line(self.traceback)

    @property
    def in_short(self) -> str:
        """One line: kind, message and place."""
        message = self.message.strip().partition("\n")[0]
        return f"{self.kind}: {message}{at_user_line(self.traceback)}"


@dataclass(slots=True)
class EnvironmentEvent:
    """One call to an environment: `reset`, `step`, `evaluate` or `close`."""

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
    """The calls to an episode's environment, in order."""

    name: str
    """As in the YAML: a class, `gymnasium:ID`, or the address of a service."""
    events: list[EnvironmentEvent] = field(default_factory=list)
    left_out: int = 0
    """Further steps, beyond those that are kept."""
    began: float = 0.0
    """Unix time at which it was requested; `EnvironmentEvent.started_s` counts from here. 0: unknown."""


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
    """The parts of the judge's reward by name, before weighting. Empty if the judge returned one number."""
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
    """The calls to its environment; None without one."""
    prompt_version: str = ""
    """Version of the prompt templates that it was given; empty if there are none."""
    prompts_used: list[str] | None = None
    """The templates that its workflow used; None if unknown."""
    began: float = 0.0
    """Unix time from which it could make calls; `Call.started_s` counts from here. 0: unknown."""
    spans: list[Span] = field(default_factory=list)
    """Spans that its code, and the programs it used, reported, in order of arrival."""
    spans_left_out: int = 0
    """Further spans, beyond those that are kept."""

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
