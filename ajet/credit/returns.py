"""What each call of an episode brought: its return to go, and the whole return of the line of calls it belongs to. And
what the episode earned in all.

A line is a call with those that led to it and those it led to. Replies to one prompt are on lines of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ajet.credit.summary import EpisodeSummary
from ajet.schema.call_tree import ROOT


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
    """From this call on, discounted: what the turn and state baselines compare."""
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
