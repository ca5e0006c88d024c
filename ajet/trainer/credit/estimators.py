"""Computes an advantage and a weight for every call from the rewards of a batch, and cuts a step into mini-batches.

Statistics are taken over episodes: an episode with many calls, or one that was split into many samples, weighs no more
than an episode with one. Only calls of the same agent are compared with each other (`ajet.trainer.credit.baselines`).
The loss is the sum of weight x token loss. Weights depend only on the batch's episodes, never on how an episode was
split into calls, rows or packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import comb, sqrt
from typing import NamedTuple

import numpy as np

from ajet.trainer.credit.baselines import Baseline, Compared, Comparison, Formula, compare, statistics
from ajet.trainer.credit.summary import EpisodeSummary, Overlong, returns_of


class LossNorm(StrEnum):
    """What an episode's token losses are divided by."""

    TOKEN_MEAN = "token_mean"
    """1 / all trained tokens of the batch: every token counts the same."""
    SEQUENCE_MEAN = "sequence_mean"
    """1 / (trained episodes x the episode's tokens): every episode counts the same."""
    DR_GRPO = "dr_grpo"
    """1 / (all episodes x a constant length): no bias by length, nor by how many groups teach something."""


@dataclass(slots=True)
class CallCredit:
    """The credit of one call, shared by all its trained tokens."""

    entries: list[tuple[float, float]] = field(default_factory=list)
    """(advantage, weight) pairs: one, or with `multiplicity` one per leaf; none if the call isn't trained.
    A token's loss is the sum over them of weight x loss(advantage). Never add them up: clipping isn't linear."""

    @property
    def advantage(self) -> float:
        """The mean advantage, for tables and logs; 0 without entries."""
        return sum(advantage for advantage, _ in self.entries) / len(self.entries) if self.entries else 0.0

    @property
    def weight(self) -> float:
        """The total weight of each token, for tables and logs."""
        return sum(weight for _, weight in self.entries)


@dataclass(slots=True)
class EpisodeCredit:
    """The credit of one episode's calls, in the order of its tree."""

    episode_id: str
    calls: list[CallCredit]
    norm: LossNorm = LossNorm.TOKEN_MEAN
    """What its weights are divided by, in each part of the batch that is an update of its own."""

    @property
    def trained(self) -> bool:
        """Whether any of its tokens is trained."""
        return any(call.entries for call in self.calls)


@dataclass(slots=True)
class Credit:
    """The credit of a batch: one list per group, in the order of the groups."""

    groups: list[list[EpisodeCredit]]
    zero_variance_groups: int = 0
    """Groups that teach nothing because what they are compared with all had the same reward."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[EpisodeCredit]:
        return [episode for group in self.groups for episode in group]


def token_weights(
    groups: Sequence[Sequence[EpisodeSummary]],
    trained: Sequence[Sequence[bool]],
    norm: LossNorm,
    length: float,
    multiplicity: bool,
) -> list[list[float]]:
    """The weight of a token (of one entry of it) in each episode; 0 in episodes that aren't trained.

    `length` is Dr.GRPO's constant. Its other factor counts every episode of the batch, trained or not.
    """
    counts = [
        [
            (episode.row_tokens if multiplicity else episode.tokens) if kept else 0
            for episode, kept in zip(*pair, strict=True)
        ]
        for pair in zip(groups, trained, strict=True)
    ]
    tokens = sum(map(sum, counts))
    holding = sum(count > 0 for group in counts for count in group)
    everyone = sum(map(len, groups))

    def weight(count: int) -> float:
        if not count:
            return 0.0
        if norm is LossNorm.TOKEN_MEAN:
            return 1.0 / tokens
        return 1.0 / (holding * count) if norm is LossNorm.SEQUENCE_MEAN else 1.0 / (everyone * length)

    return [[weight(count) for count in group] for group in counts]


class MiniBatch(NamedTuple):
    """The episodes of one update."""

    episodes: list[int]
    """Their places in the batch."""
    scale: float
    """The factor for their weights that makes them count like a separate batch."""


def mini_batches(tokens: Sequence[int], count: int, norm: LossNorm, seed: Sequence[int]) -> list[MiniBatch]:
    """Cut a batch into at most `count` parts, none empty. `tokens`: each episode's trained tokens (entries of them).

    With a norm over episodes, parts are as large as their numbers of episodes; with the mean over tokens, as their
    numbers of tokens.
    """
    order = list(range(len(tokens)))
    if count == 1 or len(order) < 2:
        return [MiniBatch(order, 1.0)]
    np.random.default_rng(list(seed)).shuffle(order)
    parts = [part.tolist() for part in np.array_split(np.array(order), min(count, len(order)))]
    if norm is LossNorm.TOKEN_MEAN:
        return [MiniBatch(part, sum(tokens) / sum(tokens[index] for index in part)) for part in parts]
    return [MiniBatch(part, len(order) / len(part)) for part in parts]


EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How a value becomes an advantage."""

    name: str
    formula: Formula | None
    """From a value and the statistics of what it is compared with. None: by the group's successes (pass@k)."""
    whole_batch: bool = False
    """Values are compared with the whole batch instead of their group."""
    batch_deviation: bool = False
    """Advantages are divided by their standard deviation in the batch."""

    def __str__(self) -> str:
        return self.name


def _normalised(of: Comparison) -> float:
    return (of.value - of.mean) / (of.deviation + EPSILON)


def _centred(of: Comparison) -> float:
    return of.value - of.mean


def _leave_one_out(of: Comparison) -> float:
    return of.value - (of.mean * of.samples - of.own) / (of.samples - 1)


GRPO = AdvantageEstimator("grpo", _normalised)
"""(value - group mean) / group standard deviation."""
DR_GRPO = AdvantageEstimator("drgrpo", _centred)
"""value - group mean."""
RLOO = AdvantageEstimator("rloo", _leave_one_out)
"""value - mean of the other episodes of the group."""
REINFORCE_PLUS_PLUS = AdvantageEstimator("reinforce_plus_plus", _normalised, whole_batch=True)
"""(value - batch mean) / batch standard deviation, without groups."""
REINFORCE_PLUS_PLUS_BASELINE = AdvantageEstimator("reinforce_plus_plus_baseline", _centred, batch_deviation=True)
"""(value - group mean) / batch standard deviation of that difference."""
PASS_AT_K = AdvantageEstimator("pass_at_k", None)
"""What an episode adds to the success of the best of k."""


class ZeroVariance(StrEnum):
    """What happens to a group whose episodes all have the same value."""

    SKIP = "skip"
    """Its tokens are neither trained nor counted."""
    KEEP = "keep"
    """Its tokens are trained with advantage 0, so only the KL and entropy terms act; they count in the mean."""
    RESAMPLE = "resample"
    """It is skipped, and the loop asks for other groups in its place."""


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """The estimator, and how tokens are weighted."""

    estimator: AdvantageEstimator = GRPO
    baseline: Baseline = Baseline.EPISODE
    loss_norm: LossNorm = LossNorm.TOKEN_MEAN
    zero_variance: ZeroVariance = ZeroVariance.SKIP
    gamma: float = 1.0
    """Discount from one call of an agent to its next. The episode baseline compares undiscounted returns."""
    state_weight: float = 1.0
    """The state baseline's weight of the advantage among calls in the same state, beside the episode's."""
    pass_k: int = 4
    """The k of the pass@k advantage."""
    success_threshold: float = 1.0
    """Reward from which an episode that does not say so itself is a success, for the pass@k advantage."""
    multiplicity: bool = False
    """One entry per leaf under a token, with that leaf's advantage, instead of one entry with its own call's."""
    dr_grpo_length: float = 1.0
    """The constant that Dr. GRPO divides by: the longest possible response."""
    overlong: Overlong | None = None
    mask_overlong: bool = False
    """Episodes whose last reply was cut by its length count in the baseline but are not trained."""

    @property
    def leaves_equal_groups_out(self) -> bool:
        """An estimator that compares the whole batch trains them."""
        return self.zero_variance is not ZeroVariance.KEEP and not self.estimator.whole_batch


def compute_credit(groups: Sequence[Sequence[EpisodeSummary]], settings: CreditSettings) -> Credit:
    """An advantage and a weight for every call of every episode of the batch."""
    compared = [_compare_group(group, settings) for group in groups]
    flat = [not group.varied for group in compared]
    batch_wide = settings.estimator.whole_batch
    drop = [same and settings.leaves_equal_groups_out for same in flat]
    advantages = [group.advantages for group in compared]
    if batch_wide:
        whole_batch = _compare([episode for group in groups for episode in group], settings)
        spread = iter(whole_batch.advantages)
        advantages = [[next(spread) for _ in group] for group in groups]
        compared, flat = [whole_batch], [not whole_batch.varied] * len(groups)
    elif settings.estimator.batch_deviation:
        advantages = _over_batch_deviation(groups, advantages)

    credited = _credited(groups, advantages, drop, settings)
    # where no token is trained, the rewards are not why
    alike = [same and any(episode.tokens for episode in group) for same, group in zip(flat, groups, strict=True)]
    metrics = _metrics(groups, credited, alike, settings) | {
        "credit/agents_alone": float(sum(one.alone for one in compared)),
        "credit/fallback_calls": float(sum(one.fallbacks for one in compared)),
    }
    return Credit(credited, zero_variance_groups=sum(alike), metrics=metrics)


def teaches(group: Sequence[EpisodeSummary], settings: CreditSettings) -> bool:
    """Whether the group's episodes differ in what they are compared by."""
    return _compare_group(group, settings).varied


def imitation_credit(
    groups: Sequence[Sequence[EpisodeSummary]], settings: CreditSettings, *, advantage: float = 1.0
) -> Credit:
    """The same advantage for every call, with the usual weights: 1 to imitate, 0 where a teacher adds its own."""
    none = [False] * len(groups)
    advantages = [[[advantage] * len(episode.calls) for episode in group] for group in groups]
    credited = _credited(groups, advantages, none, settings)
    return Credit(credited, metrics=_metrics(groups, credited, none, settings))


def _credited(
    groups: Sequence[Sequence[EpisodeSummary]],
    advantages: Sequence[Sequence[list[float]]],
    drop: Sequence[bool],
    settings: CreditSettings,
) -> list[list[EpisodeCredit]]:
    """The advantages with their weights. `drop`: which groups aren't trained."""
    trained = [
        [not dropped and not _masked(episode, settings) for episode in group]
        for group, dropped in zip(groups, drop, strict=True)
    ]
    weights = token_weights(groups, trained, settings.loss_norm, settings.dr_grpo_length, settings.multiplicity)
    credited: list[list[EpisodeCredit]] = []
    for number, group in enumerate(groups):
        row = []
        for index, episode in enumerate(group):
            calls = [CallCredit() for _ in episode.calls]
            if trained[number][index]:
                calls = _entries(episode, advantages[number][index], weights[number][index], settings.multiplicity)
            row.append(EpisodeCredit(episode.episode_id, calls, settings.loss_norm))
        credited.append(row)
    return credited


def _masked(episode: EpisodeSummary, settings: CreditSettings) -> bool:
    return settings.mask_overlong and episode.cut


def _compare(episodes: Sequence[EpisodeSummary], settings: CreditSettings) -> Compared:
    formula = settings.estimator.formula
    assert formula is not None, "pass@k compares no values"
    returns = [returns_of(episode, settings.gamma, settings.overlong) for episode in episodes]
    return compare(episodes, returns, settings.baseline, formula, settings.state_weight)


def _compare_group(group: Sequence[EpisodeSummary], settings: CreditSettings) -> Compared:
    if settings.estimator.formula is not None:
        return _compare(group, settings)
    threshold = settings.success_threshold
    successes = [e.reward >= threshold if e.success is None else e.success for e in group]
    values = pass_at_k_advantages(successes, settings.pass_k)
    by_call = [[value] * len(episode.calls) for episode, value in zip(group, values, strict=True)]
    trained = any(episode.tokens for episode in group)
    return Compared(by_call, varied=trained and any(value != 0.0 for value in values))


def pass_at_k_advantages(successes: Sequence[bool], k: int) -> list[float]:
    """An episode's advantage where a group is worth its best of `k`: the mean, over the subsets of k that hold it, of
    their standardised reward (1 if one of them succeeds). In closed form, so nothing is sampled. All are 0 if every
    subset, or none, holds a success; a group of at most k has one subset."""
    count, lost = len(successes), sum(not success for success in successes)
    size = min(k, count)
    passed = 1.0 - comb(lost, size) / comb(count, size)
    deviation = sqrt(passed * (1.0 - passed))
    if deviation == 0.0:
        return [0.0] * count
    # what a subset is worth that holds this failed episode and k - 1 others
    despite = 1.0 - comb(lost - 1, size - 1) / comb(count - 1, size - 1) if lost else 1.0
    return [((1.0 if success else despite) - passed) / deviation for success in successes]


def _over_batch_deviation(
    groups: Sequence[Sequence[EpisodeSummary]], advantages: Sequence[Sequence[list[float]]]
) -> list[list[list[float]]]:
    """Each agent's advantages over their standard deviation in the batch, in which an episode is one sample."""
    samples: dict[str, list[list[float]]] = {}
    for group, rows in zip(groups, advantages, strict=True):
        for episode, row in zip(group, rows, strict=True):
            for agent in dict.fromkeys(call.agent for call in episode.calls):
                mine = [
                    (call.tokens, value) for call, value in zip(episode.calls, row, strict=True) if call.agent == agent
                ]
                trained = [value for tokens, value in mine if tokens]
                samples.setdefault(agent, []).append(trained or [value for _, value in mine])
    found = {agent: statistics(of_agent) for agent, of_agent in samples.items()}
    return [
        [
            [
                (value - found[call.agent].mean) / (found[call.agent].deviation + EPSILON)
                for call, value in zip(episode.calls, row, strict=True)
            ]
            for episode, row in zip(group, rows, strict=True)
        ]
        for group, rows in zip(groups, advantages, strict=True)
    ]


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


def _metrics(
    groups: Sequence[Sequence[EpisodeSummary]],
    credited: list[list[EpisodeCredit]],
    alike: list[bool],
    settings: CreditSettings,
) -> dict[str, float]:
    advantages = [call.advantage for group in credited for episode in group for call in episode.calls if call.entries]
    count = len(advantages)
    mean = sum(advantages) / count if count else 0.0
    return {
        "credit/groups": float(len(groups)),
        "credit/zero_variance_groups": float(sum(alike)),
        "credit/masked_overlong": float(sum(_masked(episode, settings) for group in groups for episode in group)),
        "credit/episodes_trained": float(sum(episode.trained for group in credited for episode in group)),
        "credit/advantage/mean": mean,
        "credit/advantage/std": sqrt(sum((a - mean) ** 2 for a in advantages) / count) if count else 0.0,
    }
