"""What credit needs to know about an episode: small, without tokens, the same for every backbone.

In: an `Episode`. Out: an `EpisodeSummary` of plain numbers and strings, which can go to another process as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ajet.schema.call_tree import ROOT, Call, CallTree
from ajet.schema.episode import Episode


@dataclass(slots=True)
class CallSummary:
    """One model call, as credit sees it."""

    agent: str
    tokens: int
    """Trained tokens."""
    reward: float | None = None
    """A reward of its own."""
    next: int = ROOT
    """The same agent's next call that follows from this one, never an alternative to it. ROOT: there is none."""
    leaves: list[int] = field(default_factory=list)
    """The trained calls at or under this one that no trained call continues: one per row that contains this call."""


@dataclass(slots=True)
class EpisodeSummary:
    """One episode, as credit sees it."""

    episode_id: str
    group_id: str
    reward: float
    calls: list[CallSummary]
    agent_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Trained tokens, each counted once."""
        return sum(call.tokens for call in self.calls)

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
    calls = [
        CallSummary(
            agent=call.agent,
            tokens=int(call.mask.sum()),
            reward=call.reward,
            next=_next_call(tree, index, ancestors),
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
    """The first later call of the same agent that neither is nor continues an alternative to this one."""
    call = tree.calls[index]
    for later in range(index + 1, len(tree.calls)):
        other = tree.calls[later]
        if other.agent != call.agent or _same_prompt(call, other):
            continue
        if any(_same_prompt(call, tree.calls[above]) for above in ancestors[later] if above != index):
            continue
        return later
    return ROOT


def _same_prompt(one: Call, other: Call) -> bool:
    return one.prompt_run == other.prompt_run and one.prompt_tokens == other.prompt_tokens
