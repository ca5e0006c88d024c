"""What credit needs to know about an episode, without tokens: `EpisodeSummary`, and the returns of its calls.

In: an `Episode`. Out: an `EpisodeSummary` of plain numbers and strings, which can go to another process as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from ajet.schema.episode import ROOT, Call, CallTree, Episode, Outcome


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
    told = _told(tree, ancestors)
    follows = [_next_call(tree, index, told) for index in range(len(tree.calls))]
    calls = [
        CallSummary(
            agent=call.agent,
            tokens=int(call.mask.sum()),
            spared=len(call.mask) if call.drop == "failure_reward" else 0,
            reward=call.reward,
            replaces_outcome=call.replaces_outcome,
            next=follows[index],
            previous=_previous_call(tree, index, told),
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


REWRITTEN = ("reply_changed", "message_changed", "history_rewritten")
"""Reasons of forks whose request doesn't hold the reply of the nearest call. With any other, it does."""


def _told(tree: CallTree, ancestors: list[list[int]]) -> list[list[int]]:
    """For each call, the calls whose replies are in its messages, also where the template wrote them anew."""
    told: list[list[int]] = []
    first: dict[tuple[int, int], int] = {}
    for index, call in enumerate(tree.calls):
        same = first.setdefault((call.prompt_run, call.prompt_tokens), index)
        fork = tree.calls[same].fork  # a retry's prompt forks nowhere itself
        above = ancestors[index]
        if fork is not None and fork.reason not in REWRITTEN and ROOT < fork.nearest < index:
            above = sorted({*above, fork.nearest, *told[fork.nearest]})
        told.append(above)
    return told


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


@dataclass(frozen=True, slots=True)
class Overlong:
    """A soft penalty for long episodes: from a length of `limit - buffer` tokens on, the reward falls linearly.

    From `limit` on, the penalty is `penalty`.
    """

    limit: int
    buffer: int
    penalty: float = 1.0

    def shaped(self, reward: float, tokens: int) -> float:
        """The reward of an episode of this length."""
        over = (tokens - (self.limit - self.buffer)) / self.buffer
        return reward - self.penalty * min(max(over, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Returns:
    """One value for each call of an episode."""

    whole: list[float]
    """The line's whole return, undiscounted: what the episode baseline compares."""
    to_go: list[float]
    """The discounted return from this call on, which the turn and state baselines compare."""
    turn: list[int]
    """How many calls led to this one."""


def returns_of(episode: EpisodeSummary, gamma: float, overlong: Overlong | None = None) -> Returns:
    """Rewards of calls, and the outcome (the agent's reward, or else the episode's) at each line's last call.

    A reward that replaces the outcome keeps it from its own call and from those that led to it.
    """
    shaping = 0.0 if overlong is None else overlong.shaped(0.0, episode.length)
    to_go = _to_go(episode, gamma, shaping)
    whole = to_go if gamma == 1.0 else _to_go(episode, 1.0, shaping)
    before = [0.0] * len(episode.calls)
    turn = [0] * len(episode.calls)
    for index, call in enumerate(episode.calls):
        if call.previous != ROOT:
            before[index] = before[call.previous] + episode.calls[call.previous].own
            turn[index] = turn[call.previous] + 1
    return Returns([rest + earlier for rest, earlier in zip(whole, before, strict=True)], to_go, turn)


def earned(episode: EpisodeSummary) -> float:
    """What credit compares of an episode, as one number: the mean over its trained agents of their whole return.

    An agent's is the mean over its trained calls. Discounts, the overlong penalty and the KL penalty belong to the
    update and are not in it, so without rewards of calls and agents this is the episode's reward.
    """
    trained = any(call.tokens for call in episode.calls)
    by_agent: dict[str, list[float]] = {}
    for call, whole in zip(episode.calls, returns_of(episode, gamma=1.0).whole, strict=True):
        if call.tokens or not trained:
            by_agent.setdefault(call.agent, []).append(whole)
    return _mean([_mean(values) for values in by_agent.values()]) if by_agent else episode.reward


def _mean(values: Sequence[float]) -> float:
    """Exact where all are equal."""
    return values[0] + sum(value - values[0] for value in values) / len(values)


def _to_go(episode: EpisodeSummary, gamma: float, shaping: float) -> list[float]:
    count = len(episode.calls)
    rewards, outcomes = [0.0] * count, [0.0] * count
    for index in range(count - 1, -1, -1):
        call = episode.calls[index]
        if call.next == ROOT:
            rewards[index] = call.own + shaping
            outcomes[index] = episode.agent_reward(call.agent)
        else:
            rewards[index] = call.own + gamma * rewards[call.next]
            outcomes[index] = gamma * outcomes[call.next]
        if call.replaces_outcome:
            outcomes[index] = 0.0
    return [reward + outcome for reward, outcome in zip(rewards, outcomes, strict=True)]
