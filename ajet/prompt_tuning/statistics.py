"""Whether one candidate is better than another, or only luckier: paired differences, task by task.

The interval is Student's t over the differences; because few or coarse rewards make it too narrow, a difference also
has to survive a sign-flip test before it counts as more than noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ajet.prompt_tuning.trial import Score

LEVEL = 0.95
EXACT_UP_TO = 14
"""Differences up to which all 2ⁿ signs are tried."""
FLIPS = 20_000
"""Beyond: so many random ones, which gives a p-value of .05 to about ±.003."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much better `after` is than `before`."""

    tasks: int
    """Tasks that count in both."""
    before: float
    after: float
    low: float
    """Of the gain, at 95 %."""
    high: float
    p: float
    """How often signs drawn by lot give a gain as far from 0 as this one."""
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


def compare(before: Score, after: Score) -> Comparison | None:
    """On the tasks that count in both; None if there is none."""
    first, second = before.values, after.values
    tasks = [task for task in first if task in second]
    if not tasks:
        return None
    differences = [second[task] - first[task] for task in tasks]
    low, high = interval(differences)
    return Comparison(
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
        sums = (sum(one * sign for one, sign in zip(moved, signs, strict=True)) for signs in _signs(len(moved)))
        return sum(abs(one) >= reached for one in sums) / float(2 ** len(moved))
    draw = random.Random(0)
    hits = sum(abs(sum(one if draw.random() < 0.5 else -one for one in moved)) >= reached for _ in range(FLIPS))
    return (hits + 1) / (FLIPS + 1)


def _signs(count: int) -> product[tuple[int, ...]]:
    return product((1, -1), repeat=count)


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
