"""`Rewards`: what a workflow said its calls, agents and the episode are worth. Values come in as finite numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from ajet.context_tracker.record import CallRecord
from ajet.schema.errors import RewardError


class Rewards:
    """Collects rewards while the episode runs, and settles them at its end."""

    def __init__(self) -> None:
        self.episode: float | None = None
        self.by_agent: dict[str, float] = {}

    def give(
        self,
        value: float,
        call: str | None,
        agent: str | None,
        calls: Mapping[str, CallRecord],
        agents: Collection[str],
    ) -> None:
        """`tuner.reward(value, call=…)`, `(value, agent=…)` or `(value)`."""
        if call is not None and agent is not None:
            raise RewardError("tuner.reward takes call=… or agent=…, not both")
        if call is not None:
            if call not in calls:
                raise RewardError(f"tuner.reward(call={call!r}): this episode has no such call; it has {_some(calls)}")
            calls[call].call.reward = value
        elif agent is not None:
            if agent not in agents:
                raise RewardError(f"tuner.reward(agent={agent!r}): no such agent; the agents are {_some(agents)}")
            self.by_agent[agent] = value
        else:
            self.episode = value

    def settle(
        self, reward: float | Sequence[float] | None, records: Sequence[CallRecord], *, failed: bool
    ) -> float | None:
        """The episode's reward; a list is written to its calls, and its sum is the episode's."""
        if reward is None:
            return None if failed else self.episode
        if isinstance(reward, Sequence):
            return self._settle_list(reward, records)
        return reward

    @staticmethod
    def _settle_list(rewards: Sequence[float], records: Sequence[CallRecord]) -> float:
        answered = [record for record in records if record.reply is not None]
        hint = "give each call its reward by tuner.reward(value, call=…), or each agent by tuner.reward(value, agent=…)"
        agents = sorted({record.call.agent for record in answered})
        if len(agents) > 1:
            raise RewardError(f"a list of rewards needs an episode of one agent, this one has {_some(agents)}: {hint}")
        for before, after in pairwise(answered):
            if after.call.extends != before.index:
                why = f" ({after.call.fork.reason})" if after.call.fork else ""
                raise RewardError(
                    "a list of rewards needs an episode without branches, but "
                    f"{after.call.name} does not continue {before.call.name}{why}: {hint}"
                )
        if len(rewards) != len(answered):
            raise RewardError(f"{len(rewards)} rewards for {len(answered)} model calls: {hint}")
        for record, reward in zip(answered, rewards, strict=True):
            record.call.reward = reward
        return math.fsum(rewards)


def _some(names: Collection[str], limit: int = 8) -> str:
    shown = ", ".join(list(names)[:limit])
    return (shown + ", …" if len(names) > limit else shown) or "none"
