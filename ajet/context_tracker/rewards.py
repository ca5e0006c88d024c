"""`Rewards`: what a workflow said its calls, agents and the episode are worth: finite numbers, or an error."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ajet.context_tracker.record import CallRecord
from ajet.schema.episode import EpisodeStatus
from ajet.schema.errors import RewardError

ENDED_WELL = (EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED)


class Rewards:
    """Collects rewards while the episode runs, and settles them at its end."""

    def __init__(self) -> None:
        self.episode: float | None = None
        self.by_agent: dict[str, float] = {}

    def give(
        self,
        value: Any,
        call: str | None,
        agent: str | None,
        calls: Mapping[str, CallRecord],
        agents: Collection[str],
    ) -> None:
        """`tuner.reward(value, call=…)`, `(value, agent=…)` or `(value)`."""
        if call is not None and agent is not None:
            raise RewardError("tuner.reward takes call=… or agent=…, not both")
        number = finite(value, "tuner.reward")
        if call is not None:
            if call not in calls:
                raise RewardError(f"tuner.reward(call={call!r}): this episode has no such call; it has {_some(calls)}")
            calls[call].call.reward = number
        elif agent is not None:
            if agent not in agents:
                raise RewardError(f"tuner.reward(agent={agent!r}): no such agent; the agents are {_some(agents)}")
            self.by_agent[agent] = number
        else:
            self.episode = number

    def settle(
        self, reward: float | Sequence[float] | None, status: EpisodeStatus, records: Sequence[CallRecord]
    ) -> float | None:
        """The episode's reward; a list is written to its calls, and its sum is the episode's."""
        if reward is None:
            return self.episode if status in ENDED_WELL else None
        if isinstance(reward, (list, tuple)):
            return self._settle_list(reward, records)
        return finite(reward, "the reward")

    @staticmethod
    def _settle_list(rewards: Sequence[Any], records: Sequence[CallRecord]) -> float:
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
        numbers = [finite(value, f"reward[{index}]") for index, value in enumerate(rewards)]
        for record, number in zip(answered, numbers, strict=True):
            record.call.reward = number
        return math.fsum(numbers)


def finite(value: Any, where: str) -> float:
    """The value as a float; anything but a finite number is a RewardError."""
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardError(f"{where} must be a finite number, not {value!r}")
    return float(value)


def _some(names: Collection[str], limit: int = 8) -> str:
    shown = ", ".join(list(names)[:limit])
    return (shown + ", …" if len(names) > limit else shown) or "none"
