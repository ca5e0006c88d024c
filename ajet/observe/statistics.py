"""What measured figures are worth: a share with its interval, and the difference of two models task by task. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z = 1.96
"""Of a 95 % interval."""
EXACT = 12
"""Differences that are not 0, up to which all 2^n sign flips are counted."""
DRAWS = 10_000
"""Drawn sign flips beyond that."""


class Share(NamedTuple):
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Share:
        """Wilson's interval around the mean of these values, all in 0 … 1. Each counts as one trial: a value between
        0 and 1 varies less than that, so the interval is rather too wide than too narrow."""
        count, share = len(values), sum(values) / len(values)
        middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
        half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
        return cls(share, max(0.0, middle - half), min(1.0, middle + half))

    def __str__(self) -> str:
        return f"{self.value:.2f}  ({self.low:.2f} … {self.high:.2f})"


class Gain(NamedTuple):
    """How much better the second of two models is on the tasks that both tried: the mean of the differences task by
    task, which is sharper than the difference of two means, because the tasks' own difficulty cancels out."""

    value: float
    low: float
    """95 % interval: Student's t over the tasks' differences. One task has none: low is -inf, high inf."""
    high: float
    p: float
    """How often sign flips of the differences, as likely as these if both are equally good, lead as far from 0."""
    tasks: int
    unshared: int
    """Tasks that only one of the two tried."""
    better: int
    worse: int

    @classmethod
    def of(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Gain | None:
        """From each task's mean result. None: the two have no task in common."""
        shared = sorted(before.keys() & after.keys())
        if not shared:
            return None
        found = np.array([after[task] - before[task] for task in shared], float)
        count, mean = len(found), float(found.mean())
        half = t_quantile(count - 1) * float(found.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        unshared = len(before.keys() ^ after.keys())
        better, worse = int((found > 0).sum()), int((found < 0).sum())
        return cls(mean, mean - half, mean + half, sign_flip_p(found), count, unshared, better, worse)

    def __str__(self) -> str:
        interval = f"({self.low:+.3f} … {self.high:+.3f})" if math.isfinite(self.low) else "(one task: no interval)"
        return f"{self.value:+.3f}  {interval}  p {self.p:.2g}"


def t_quantile(freedom: int) -> float:
    """How many standard errors a 95 % interval reaches to each side, for so many degrees of freedom.

    With t = √freedom · tan(angle), the density of the angle is cos(angle)^(freedom - 1): a bounded integral.
    """
    freedom = min(freedom, 10_000)  # from there on it is the normal distribution's
    angles = np.linspace(0.0, math.pi / 2, 40_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95 * below[-1], below, angles)))


def sign_flip_p(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided p of a permutation test that flips each difference's sign: exact for few tasks, else drawn, always
    with the same seed."""
    found = np.asarray(differences, float)
    found = found[found != 0]
    observed = abs(float(found.sum())) - 1e-9 * float(np.abs(found).sum())
    if len(found) <= EXACT:
        bits = np.arange(2 ** len(found))[:, None] >> np.arange(len(found)) & 1
        return float((np.abs((1 - 2 * bits) @ found) >= observed).mean())
    signs = np.random.default_rng(0)
    far = sum(
        int((np.abs(signs.choice((-1.0, 1.0), (1000, len(found))) @ found) >= observed).sum())
        for _ in range(DRAWS // 1000)
    )
    return (1 + far) / (1 + DRAWS)
