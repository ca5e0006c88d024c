"""What credit needs to know about an episode: small, without tokens, the same for every backbone.

In: an `Episode`. Out: an `EpisodeSummary` of plain numbers and strings, which can go to another process as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from ajet.schema.call_tree import ROOT, Call, CallTree
from ajet.schema.episode import Episode, Outcome


@dataclass(slots=True)
class CallSummary:
    """One model call, as credit sees it."""

    agent: str
    tokens: int
    """Trained tokens."""
    reward: float | None = None
    """A reward of its own. It adds to the outcome."""
    replaces_outcome: bool = False
    """Its reward stands in for the outcome: for this call and those that led to it."""
    penalty: float = 0.0
    """What is taken off where the call was made (`use_kl_in_reward`)."""
    next: int = ROOT
    """The same agent's next call that follows from this one, never an alternative to it. ROOT: there is none."""
    previous: int = ROOT
    """The same agent's call that led to this one. ROOT: there is none."""
    state: str = ""
    """What the agent had just been shown: equal for calls that answer the same observation."""
    leaves: list[int] = field(default_factory=list)
    """The trained calls at or under this one that no trained call continues: one per row that contains this call."""
    spared: int = 0
    """Sampled tokens that only `failure_reward: mask`, or a row that was cut, keeps from being trained. They count
    towards the episode's length."""

    @property
    def own(self) -> float:
        """What this call itself brought."""
        return (self.reward or 0.0) - self.penalty


@dataclass(slots=True)
class EpisodeSummary:
    """One episode, as credit sees it."""

    episode_id: str
    group_id: str
    reward: float
    calls: list[CallSummary]
    agent_rewards: dict[str, float] = field(default_factory=dict)
    success: bool | None = None
    """As the judge or the workflow said. None: the reward decides."""
    cut: bool = False
    """Its last reply was cut by its length."""

    @property
    def tokens(self) -> int:
        """Trained tokens, each counted once."""
        return sum(call.tokens for call in self.calls)

    @property
    def length(self) -> int:
        """What `overlong.buffer` counts: trained and spared tokens."""
        return sum(call.tokens + call.spared for call in self.calls)

    @property
    def row_tokens(self) -> int:
        """Trained tokens, each counted as often as separate root-to-leaf rows would train it."""
        return sum(call.tokens * len(call.leaves) for call in self.calls)

    def agent_reward(self, agent: str) -> float:
        """The agent's own reward if it has one, or the episode's."""
        return self.agent_rewards.get(agent, self.reward)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`, which `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EpisodeSummary:
        """The inverse of `to_json`."""
        return cls(**{**data, "calls": [CallSummary(**call) for call in data["calls"]]})


def summarise(episode: Episode) -> EpisodeSummary:
    """The summary of a usable episode."""
    if episode.reward is None:
        raise ValueError(f"episode {episode.episode_id!r} ({episode.status}) has no reward, so it can't get credit")
    tree = episode.tree
    ancestors = _ancestor_calls(tree)
    leaves = _leaves(tree, ancestors)
    follows = [_next_call(tree, index, ancestors) for index in range(len(tree.calls))]
    calls = [
        CallSummary(
            agent=call.agent,
            tokens=int(call.mask.sum()),
            spared=len(call.mask) if call.drop == "failure_reward" else 0,
            reward=call.reward,
            replaces_outcome=call.replaces_outcome,
            next=follows[index],
            previous=_previous_call(tree, index, ancestors),
            state=_state(tree, index),
            leaves=leaves[index],
        )
        for index, call in enumerate(tree.calls)
    ]
    return EpisodeSummary(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        reward=float(episode.reward),
        calls=calls,
        agent_rewards=dict(episode.agent_rewards),
        success=episode.is_success,
        cut=Outcome.LENGTH in episode.outcomes,
    )


def _ancestor_calls(tree: CallTree) -> list[list[int]]:
    """For each call, the calls whose sampled tokens are part of its prompt."""
    of_run: list[list[int]] = []
    for run in tree.runs:
        above = of_run[run.parent] if run.parent != ROOT else []
        of_run.append([*above, run.call] if run.call != ROOT else above)
    return [of_run[call.prompt_run] if call.prompt_run != ROOT else [] for call in tree.calls]


def _leaves(tree: CallTree, ancestors: list[list[int]]) -> list[list[int]]:
    """For each call with trained tokens, the trained calls at or under it that no trained call continues."""
    trained = [index for index, call in enumerate(tree.calls) if call.mask.any()]
    continued = {above for index in trained for above in ancestors[index]}
    leaves: list[list[int]] = [[] for _ in tree.calls]
    for leaf in trained:
        if leaf not in continued:
            for above in (*ancestors[leaf], leaf):
                if tree.calls[above].mask.any():
                    leaves[above].append(leaf)
    return leaves


def _next_call(tree: CallTree, index: int, ancestors: list[list[int]]) -> int:
    """The first later call of the same agent that this one may have led to.

    Of several replies to one prompt: the one that was built upon, or else the last.
    """
    for later in range(index + 1, len(tree.calls)):
        if not _leads_to(tree, index, later, ancestors):
            continue
        replies = [at for at in range(later, len(tree.calls)) if _alternatives(tree.calls[at], tree.calls[later])]
        built = (at for at in replies if any(at in above for above in ancestors[at + 1 :]))
        return next(built, replies[-1])
    return ROOT


def _previous_call(tree: CallTree, index: int, ancestors: list[list[int]]) -> int:
    """The latest earlier call of the same agent that may have led to this one."""
    for earlier in range(index - 1, -1, -1):
        if _leads_to(tree, earlier, index, ancestors) and not _rests_on_alternative(tree, index, earlier, ancestors):
            return earlier
    return ROOT


def _leads_to(tree: CallTree, earlier: int, later: int, ancestors: list[list[int]]) -> bool:
    """Whether both are the same agent's, and the later is no alternative to the earlier nor rests on one."""
    one, other = tree.calls[earlier], tree.calls[later]
    if other.agent != one.agent or _same_prompt(one, other):
        return False
    return not _rests_on_alternative(tree, earlier, later, ancestors)


def _rests_on_alternative(tree: CallTree, index: int, other: int, ancestors: list[list[int]]) -> bool:
    """Whether call `other` is built upon another reply to the prompt of call `index`."""
    return any(above != index and _same_prompt(tree.calls[index], tree.calls[above]) for above in ancestors[other])


def _alternatives(one: Call, other: Call) -> bool:
    return one.agent == other.agent and _same_prompt(one, other)


def _same_prompt(one: Call, other: Call) -> bool:
    return one.prompt_run == other.prompt_run and one.prompt_tokens == other.prompt_tokens


def _state(tree: CallTree, index: int) -> str:
    """A digest of what the agent had just been shown: the messages since its last reply, without ids of tool calls.

    The first call's are the whole prompt. A prompt given as raw tokens stands for itself.
    """
    call = tree.calls[index]
    shown = list(takewhile(lambda message: message.get("role") != "assistant", reversed(call.new_messages)))
    if shown:
        facts = [(message.get("role"), message.get("name"), message.get("content")) for message in reversed(shown)]
        data = json.dumps(facts, sort_keys=True, default=str).encode(errors="backslashreplace")
    else:
        data = tree.prompt_ids(index).tobytes()
    return hashlib.blake2b(data, digest_size=12).hexdigest()
