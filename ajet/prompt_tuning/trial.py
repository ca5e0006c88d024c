"""`Trial`: a candidate tried on one task. `Score`: its trials on several tasks, and `compare`, whether one is better.

A trial that failed because of the engine or the infrastructure says nothing about the candidate: it has no value, and
its task is left out when candidates are compared. Any other trial without a reward counts as 0.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import product
from typing import Any, TypeVar

from ajet.schema.chat import Message

T = TypeVar("T")


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all, and return the results in order. The first error cancels the rest, and is raised without an exception
    group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


class Purpose(StrEnum):
    """The purpose of episodes."""

    SEARCH = "search"
    """Their transcripts and feedback are read, to write proposals."""
    BATCH = "batch"
    """A few validation tasks, on which several candidates are compared."""
    VALIDATION = "validation"
    """All validation tasks: decides which candidate is the best."""
    CONFIRMATION = "confirmation"
    """Tasks that no candidate has seen, once the search is over."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate tried on one task, once or several times."""

    task_id: str
    reward: float | None = None
    """The mean of its episodes' rewards; None if none has one."""
    success: float | None = None
    """The share of its episodes that succeeded."""
    failure: str = ""
    """Why an episode failed, in one line."""
    fault: bool = False
    """All of its episodes failed, and neither the candidate nor the model is the cause."""
    feedback: str = ""
    """Messages of the judge, the workflow and failures."""
    query: str = ""
    """The task's main query."""
    conversations: tuple[list[Message], ...] = ()
    """The messages of the model calls, one list for each conversation: of a `search` trial, which is read."""
    episodes: tuple[str, ...] = ()
    """Episode ids."""
    tokens: tuple[int, int] = (0, 0)
    """Prompt and sampled tokens of all its model calls."""
    prompts_used: frozenset[str] | None = None
    """The templates that its workflow asked for; None if that isn't known."""

    @property
    def value(self) -> float | None:
        """The value in a mean; None if the trial doesn't count."""
        if self.fault:
            return None
        return 0.0 if self.reward is None else self.reward

    def to_record(self) -> dict[str, Any]:
        """The record for the history, without transcripts, which are in the episodes."""
        record: dict[str, Any] = {"task": self.task_id, "reward": self.reward, "success": self.success}
        if self.failure:
            record["failure"] = self.failure
        if self.fault:
            record["fault"] = True
        return {**record, "episodes": list(self.episodes)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trial:
        """Read a trial from the history."""
        return cls(
            task_id=str(record["task"]),
            reward=record["reward"],
            success=record["success"],
            failure=str(record.get("failure", "")),
            fault=bool(record.get("fault", False)),
            episodes=tuple(record["episodes"]),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's trials, in the order of the tasks."""

    candidate: str
    """Its id."""
    purpose: Purpose
    trials: tuple[Trial, ...] = field(default_factory=tuple)

    @property
    def values(self) -> dict[str, float]:
        """By task, without those that don't count."""
        return {trial.task_id: trial.value for trial in self.trials if trial.value is not None}

    @property
    def mean(self) -> float | None:
        """Over the trials that count; None if there is none."""
        return _mean(self.values.values())

    @property
    def success(self) -> float | None:
        """The share of its trials' episodes that succeeded."""
        return _mean(0.0 if trial.success is None else trial.success for trial in self.trials if not trial.fault)


def common_means(scores: Sequence[Score]) -> list[float | None]:
    """Each score's mean over the tasks that count in all of them. A candidate of which no trial counts gets None, and
    doesn't narrow the tasks of the others."""
    counted = [score.values for score in scores]
    tasks = set.intersection(*(set(values) for values in counted if values)) if any(counted) else set()
    return [_mean(values[task] for task in sorted(tasks)) if values and tasks else None for values in counted]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


LEVEL = 0.95
EXACT_UP_TO = 14
"""Up to this number of differences, all 2ⁿ sign assignments are tried."""
FLIPS = 20_000
"""Beyond that, so many random ones are, which gives a p-value of .05 to about ±.003."""


@dataclass(frozen=True, slots=True)
class TemplateComparison:
    """How much better `after` is than `before`."""

    tasks: int
    """Tasks that count in both."""
    before: float
    after: float
    low: float
    """The gain's confidence interval at 95 %."""
    high: float
    p: float
    """The share of random sign assignments that give a gain at least as far from 0."""
    better: int
    """Tasks on which `after` earned more."""
    worse: int

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def within_noise(self) -> bool:
        """Whether chance alone may explain the difference."""
        return self.low <= 0.0 <= self.high or self.p > 1 - LEVEL

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain, "within_noise": self.within_noise}


def compare(before: Score, after: Score) -> TemplateComparison | None:
    """Compare two scores on the tasks that count in both; None if there is none."""
    first, second = before.values, after.values
    tasks = [task for task in first if task in second]
    if not tasks:
        return None
    differences = [second[task] - first[task] for task in tasks]
    low, high = interval(differences)
    return TemplateComparison(
        tasks=len(tasks),
        before=sum(first[task] for task in tasks) / len(tasks),
        after=sum(second[task] for task in tasks) / len(tasks),
        low=low,
        high=high,
        p=sign_flip_p(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )


def interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The confidence interval of their mean. One difference says nothing about its own spread: without bounds."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return -math.inf, math.inf
    variance = sum((one - mean) ** 2 for one in differences) / (count - 1)
    half = t_quantile((1 + level) / 2, count - 1) * math.sqrt(variance / count)
    return mean - half, mean + half


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided: the share of sign assignments whose sum is at least as far from 0."""
    moved = [abs(one) for one in differences if one]
    if not moved:
        return 1.0
    reached = abs(sum(differences)) - 1e-12 * sum(moved)
    if len(moved) <= EXACT_UP_TO:
        sums = map(sum, product(*((one, -one) for one in moved)))
        return sum(abs(one) >= reached for one in sums) / float(2 ** len(moved))
    draw = random.Random(0)
    hits = sum(abs(sum(one if draw.random() < 0.5 else -one for one in moved)) >= reached for _ in range(FLIPS))
    return (hits + 1) / (FLIPS + 1)


def t_quantile(probability: float, freedom: int) -> float:
    """Student's t: the value below which this share (at least one half) lies."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(value: float, freedom: int) -> float:
    """For `value` ≥ 0. Exact finite sums (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom % 2:
        total, term = 0.0, cosine
        for index in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * index) / (2 * index + 1)
        inside = (angle + sine * total) * 2 / math.pi
    else:
        total, term = 0.0, 1.0
        for index in range(1, freedom // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * index - 1) / (2 * index)
        inside = sine * total
    return 0.5 + inside / 2
