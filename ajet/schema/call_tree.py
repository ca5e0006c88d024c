"""The one data structure of an episode: every model call, exactly as the engine saw it, in a tree of token runs.

A `Run` is a stretch of tokens with one author. Context runs under the same parent merge by token id (a run is split
where two prompts part). A sampled run belongs to one call and never merges with another, even if their tokens are
equal.
The prompt of a call is the path from the root to its `prompt_run`; its reply is the run after it.

Position of a token = its depth = `run.start + offset`. A `Sample` is one path of the tree as a linear row. Pure data:
the context tracker grows a tree, the trainer trains on it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ajet.schema.chat import Message, Tool
from ajet.schema.generation import FinishReason, Sampling

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
    """A stretch of tokens by one author."""

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
    """Which message and field, or which rule of the template."""
    tokens: int = 0
    """Tokens that had to be rendered and prefilled again."""


@dataclass(slots=True)
class Call:
    """One model call: who asked, what was new, what came back."""

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
    fork: Fork | None = None
    started_s: float = 0.0
    """Seconds since the episode began."""
    seconds: float = 0.0
    reply_tokens: int = 0
    """Of a reply whose tokens the model doesn't tell: how many its server counted."""


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

    def children(self) -> list[list[int]]:
        """For each run, the runs that continue it."""
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
        """Tokens of all prompts, and of all replies: sampled ones, or those that a server only counted."""
        replies = self.sampled_tokens + sum(call.reply_tokens for call in self.calls)
        return sum(call.prompt_tokens for call in self.calls), replies

    @property
    def trained_tokens(self) -> int:
        return sum(int(call.mask.sum()) for call in self.calls)

    def canonical(self) -> bytes:
        """A digest of what was sampled in which context: equal for two trees that are the same up to names and order.

        It sees tokens, logprobs, masks, versions, agents, targets, finish reasons and rewards; not times, not names.
        """
        children = self.children()
        digests: list[bytes] = [b""] * len(self.runs)
        asked: dict[int, list[bytes]] = {}
        for call in self.calls:
            if call.run == ROOT:
                asked.setdefault(call.prompt_run, []).append(_call_digest(call))
        for index in range(len(self.runs) - 1, -1, -1):
            run = self.runs[index]
            digest = hashlib.blake2b(run.ids.tobytes(), digest_size=16)
            digest.update(b"context" if run.call == ROOT else _call_digest(self.calls[run.call]))
            for part in sorted(asked.get(index, [])) + sorted(digests[child] for child in children[index]):
                digest.update(part)
            digests[index] = digest.digest()
        return b"".join(sorted(digests[index] for index, run in enumerate(self.runs) if run.parent == ROOT))

    def isomorphic(self, other: CallTree) -> bool:
        """Whether two trees are the same up to the names and the order of their calls."""
        return len(self.runs) == len(other.runs) and self.canonical() == other.canonical()


def _call_digest(call: Call) -> bytes:
    digest = hashlib.blake2b(call.logprobs.tobytes(), digest_size=16)
    digest.update(call.mask.tobytes())
    facts = (call.agent, call.target, call.prompt_tokens, call.versions, call.finish_reason, call.trainable, call.drop)
    digest.update(repr((*facts, call.reward, call.replaces_outcome)).encode())
    return digest.digest()


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
