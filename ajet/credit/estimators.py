"""From the rewards of a batch to an advantage and a weight for every call.

All statistics are over episodes: an episode with many calls, or split into many samples, counts no more than one with a
single call. If an episode's calls differ in value (own rewards, discounting, rewards per agent), each of them counts
with an equal share of the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

from ajet.credit.summary import EpisodeSummary
from ajet.credit.weights import CallCredit, Credit, EpisodeCredit, LossNorm, token_weights
from ajet.schema.call_tree import ROOT

EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""

SAME = 1e-9
"""Values that differ by less than this, relative to their size, count as the same reward."""


class AdvantageEstimator(StrEnum):
    """How a value becomes an advantage."""

    GRPO = "grpo"
    """(value - group mean) / group standard deviation."""
    DR_GRPO = "drgrpo"
    """value - group mean."""
    RLOO = "rloo"
    """value - mean of the other episodes of the group."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """(value - batch mean) / batch standard deviation, without groups."""


class Comparison(NamedTuple):
    """A call's value, and the statistics of its group (or batch) that it is compared with."""

    value: float
    own: float
    """Mean value of its episode."""
    mean: float
    deviation: float
    episodes: int


def _normalised(of: Comparison) -> float:
    return (of.value - of.mean) / (of.deviation + EPSILON)


def _centred(of: Comparison) -> float:
    return of.value - of.mean


def _leave_one_out(of: Comparison) -> float:
    others = (of.mean * of.episodes - of.own) / (of.episodes - 1) if of.episodes > 1 else of.value
    return of.value - others


ADVANTAGES: dict[AdvantageEstimator, Callable[[Comparison], float]] = {
    AdvantageEstimator.GRPO: _normalised,
    AdvantageEstimator.DR_GRPO: _centred,
    AdvantageEstimator.RLOO: _leave_one_out,
    AdvantageEstimator.REINFORCE_PLUS_PLUS: _normalised,
}
"""The formula of each estimator."""

BATCH_WIDE = (AdvantageEstimator.REINFORCE_PLUS_PLUS,)
"""Estimators that compare a value with the whole batch instead of its group."""


class ZeroVariance(StrEnum):
    """What happens to a group whose episodes all have the same value."""

    SKIP = "skip"
    """Its tokens are neither trained nor counted."""
    KEEP = "keep"
    """Its tokens are trained with advantage 0, so only the KL and entropy terms act; they count in the mean."""
    RESAMPLE = "resample"
    """It is skipped, and the loop asks for other groups in its place."""


@dataclass(frozen=True, slots=True)
class Overlong:
    """A soft penalty for long episodes: from `limit - buffer` trained tokens on, the reward falls linearly.

    From `limit` on, the penalty is `penalty`.
    """

    limit: int
    buffer: int
    penalty: float = 1.0

    def shaped(self, reward: float, tokens: int) -> float:
        """The reward of an episode with this many trained tokens."""
        over = (tokens - (self.limit - self.buffer)) / self.buffer
        return reward - self.penalty * min(max(over, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """The estimator, and how tokens are weighted."""

    estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    loss_norm: LossNorm = LossNorm.TOKEN_MEAN
    zero_variance: ZeroVariance = ZeroVariance.SKIP
    gamma: float = 1.0
    """Discount from one call of an agent to its next."""
    per_agent_groups: bool = False
    """Compare each agent only with the same agent in the group's other episodes."""
    multiplicity: bool = False
    """One entry per leaf under a token, with that leaf's advantage, instead of one entry with its own call's."""
    dr_grpo_length: float = 1.0
    """The constant that Dr. GRPO divides by: the longest possible response."""
    overlong: Overlong | None = None


def compute_credit(groups: Sequence[Sequence[EpisodeSummary]], settings: CreditSettings) -> Credit:
    """An advantage and a weight for every call of every episode of the batch."""
    values = [[call_values(episode, settings) for episode in group] for group in groups]
    batch_wide = settings.estimator in BATCH_WIDE
    flat = [_no_variance(group, group_values) for group, group_values in zip(groups, values, strict=True)]
    drop = [same and not batch_wide and settings.zero_variance is not ZeroVariance.KEEP for same in flat]

    if batch_wide:
        everyone = [episode for group in groups for episode in group]
        spread = iter(_advantages(everyone, [v for group in values for v in group], settings))
        advantages = [[next(spread) for _ in group] for group in groups]
    else:
        advantages = [
            _advantages(group, group_values, settings) for group, group_values in zip(groups, values, strict=True)
        ]

    kept = [episode for group, dropped in zip(groups, drop, strict=True) if not dropped for episode in group]
    weights = iter(token_weights(kept, settings.loss_norm, settings.dr_grpo_length, settings.multiplicity))
    credited: list[list[EpisodeCredit]] = []
    for group, group_advantages, dropped in zip(groups, advantages, drop, strict=True):
        row = []
        for episode, by_call in zip(group, group_advantages, strict=True):
            if dropped:
                calls = [CallCredit() for _ in episode.calls]
            else:
                calls = _entries(episode, by_call, next(weights), settings.multiplicity)
            row.append(EpisodeCredit(episode.episode_id, calls, skipped=dropped))
        credited.append(row)
    return Credit(credited, zero_variance_groups=sum(flat), metrics=_metrics(groups, credited, flat))


def imitation_credit(groups: Sequence[Sequence[EpisodeSummary]], settings: CreditSettings) -> Credit:
    """Advantage 1 for every call, with the usual weights: supervised fine-tuning."""
    everyone = [episode for group in groups for episode in group]
    weights = iter(token_weights(everyone, settings.loss_norm, settings.dr_grpo_length, settings.multiplicity))
    credited = []
    for group in groups:
        row = []
        for episode in group:
            calls = _entries(episode, [1.0] * len(episode.calls), next(weights), settings.multiplicity)
            row.append(EpisodeCredit(episode.episode_id, calls))
        credited.append(row)
    return Credit(credited, metrics=_metrics(groups, credited, [False] * len(groups)))


def call_values(episode: EpisodeSummary, settings: CreditSettings) -> list[float]:
    """The value of each call: its own reward plus, discounted by gamma, the value of its agent's next call.

    An agent's last call gets the episode's (or the agent's) reward, unless it has one of its own.
    """
    shaping = 0.0
    if settings.overlong is not None:
        shaping = settings.overlong.shaped(0.0, episode.tokens)
    values = [0.0] * len(episode.calls)
    for index in range(len(episode.calls) - 1, -1, -1):
        call = episode.calls[index]
        if call.next == ROOT:
            own = call.reward if call.reward is not None else episode.agent_reward(call.agent)
            values[index] = own + shaping
        else:
            values[index] = (call.reward or 0.0) + settings.gamma * values[call.next]
    return values


def _entries(episode: EpisodeSummary, advantages: list[float], weight: float, multiplicity: bool) -> list[CallCredit]:
    credits = []
    for index, call in enumerate(episode.calls):
        if not call.tokens:
            credits.append(CallCredit())
        elif multiplicity:
            credits.append(CallCredit([(advantages[leaf], weight) for leaf in call.leaves]))
        else:
            credits.append(CallCredit([(advantages[index], weight)]))
    return credits


def _advantages(
    episodes: Sequence[EpisodeSummary], values: Sequence[list[float]], settings: CreditSettings
) -> list[list[float]]:
    """Per episode and call. With `per_agent_groups`, statistics are separate for each agent."""
    advantages = [[0.0] * len(episode.calls) for episode in episodes]
    if not settings.per_agent_groups:
        _fill(advantages, episodes, values, None, settings.estimator)
        return advantages
    for agent in sorted({call.agent for episode in episodes for call in episode.calls}):
        _fill(advantages, episodes, values, agent, settings.estimator)
    return advantages


def _fill(
    advantages: list[list[float]],
    episodes: Sequence[EpisodeSummary],
    values: Sequence[list[float]],
    agent: str | None,
    estimator: AdvantageEstimator,
) -> None:
    """Write the advantages of one agent's calls, or of all calls if `agent` is None."""
    samples = []
    for episode, by_call in zip(episodes, values, strict=True):
        sample = [by_call[i] for i, call in enumerate(episode.calls) if call.tokens and agent in (None, call.agent)]
        if not sample and agent is None:
            sample = [episode.reward]  # no token is trained, but the episode counts in the statistics
        samples.append(sample)
    present = [sample for sample in samples if sample]
    if not present:
        return
    mean, deviation = _statistics(present)
    count = len(present)
    for index, sample in enumerate(samples):
        if not sample:
            continue
        own = sum(sample) / len(sample)
        for call_index, call in enumerate(episodes[index].calls):
            if agent not in (None, call.agent):
                continue
            of = Comparison(values[index][call_index], own, mean, deviation, count)
            advantages[index][call_index] = ADVANTAGES[estimator](of)


def _statistics(samples: list[list[float]]) -> tuple[float, float]:
    """Mean and (unbiased) standard deviation over episodes, each with the same weight."""
    count = len(samples)
    mean = sum(sum(sample) / len(sample) for sample in samples) / count
    square = sum(sum((value - mean) ** 2 for value in sample) / len(sample) for sample in samples)
    return mean, sqrt(square / (count - 1)) if count > 1 else 0.0


def _no_variance(group: Sequence[EpisodeSummary], values: Sequence[list[float]]) -> bool:
    """Whether the group's trained calls and episodes all have the same value."""
    seen = [episode.reward for episode in group if not episode.tokens]
    for episode, by_call in zip(group, values, strict=True):
        seen += [by_call[i] for i, call in enumerate(episode.calls) if call.tokens]
    return not seen or max(seen) - min(seen) <= SAME * max(1.0, abs(max(seen)), abs(min(seen)))


def _metrics(
    groups: Sequence[Sequence[EpisodeSummary]], credited: list[list[EpisodeCredit]], flat: list[bool]
) -> dict[str, float]:
    advantages = [call.advantage for group in credited for episode in group for call in episode.calls if call.entries]
    count = len(advantages)
    mean = sum(advantages) / count if count else 0.0
    return {
        "credit/groups": float(len(groups)),
        "credit/zero_variance_groups": float(sum(flat)),
        "credit/episodes_trained": float(sum(not e.skipped for group in credited for e in group)),
        "credit/advantage/mean": mean,
        "credit/advantage/std": sqrt(sum((a - mean) ** 2 for a in advantages) / count) if count else 0.0,
    }
