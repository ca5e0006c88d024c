"""Statistics: what measured figures are worth (a share with its interval, the difference of two models task by task),
how the recorded tasks fared over the steps, and how rewards are spread in each step.

A page of tasks comes from the rows that `episode_tables` keeps beside the episodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import ANY, SOLVED

Z = 1.96
"""Half the width of a 95 % interval, in standard errors."""
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
        """Compare each task's mean result. None: the two have no task in common."""
        shared = sorted(before.keys() & after.keys())
        if not shared:
            return None
        found = np.array([after[task] - before[task] for task in shared], float)
        count, mean = len(found), float(found.mean())
        half = t_quantile(count - 1) * float(found.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        unshared = len(before.keys() ^ after.keys())
        better, worse = int((found > 0).sum()), int((found < 0).sum())
        return cls(mean, mean - half, mean + half, sign_flip_p(found), count, unshared, better, worse)

    @property
    def interval(self) -> str:
        """`+0.100 … +0.300`; a dash if there is none."""
        return f"{self.low:+.3f} … {self.high:+.3f}" if math.isfinite(self.low) else "–"

    def __str__(self) -> str:
        interval = self.interval if math.isfinite(self.low) else "one task: no interval"
        return f"{self.value:+.3f}  ({interval})  p {self.p:.2g}"


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


# ---------------------------------------------------------------- tasks

TaskSortKey = Literal["task_id", "attempts", "solved", "latest", "change", "reward", "last_step", "tag"]
TASK_SORT_KEYS: tuple[str, ...] = get_args(TaskSortKey)
_MOST_VALUES = 12
"""Up to so many different rewards, each is a bin of its own; of more, equal ranges are made."""
_RANGES = 16
_COLUMNS = 500
"""A chart is about so many pixels wide."""


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks. None and '' match all."""

    text: str = ""
    """Part of the id, or of the question's first words as the list shows them."""
    tag: str = ""
    validation: bool | None = None
    """Count validation's attempts only (True), training's only (False), or all."""
    solved_min: float | None = None
    solved_max: float | None = None
    """Bounds of the share of usable attempts that were solved."""


@dataclass(slots=True)
class TaskRow:
    """One task of the list."""

    task_id: str
    attempts: int
    failed: int
    """Those without a reward: they count in none of the following, as in the metrics."""
    solved: float | None
    """Share of its other attempts that were solved; None if all failed."""
    latest: float | None
    """The same in its last step."""
    change: float | None
    """From its first step to its last."""
    reward: float | None
    """Mean reward."""
    last_step: int
    tag: str
    preview: str
    by_step: list[tuple[int, float]] = field(default_factory=list)
    """Step and share solved, in order."""


def task_page(
    store: EpisodeStore,
    where: TaskFilter,
    *,
    sort: TaskSortKey = "task_id",
    descending: bool = False,
    offset: int = 0,
    limit: int = 100,
) -> tuple[list[TaskRow], int]:
    """The rows of one page, and the number of rows on all pages."""
    if sort not in TASK_SORT_KEYS:
        raise ValueError(f"can't sort by {sort!r}; sort keys: {', '.join(TASK_SORT_KEYS)}")
    scope = ANY if where.validation is None else int(where.validation)
    values: dict[str, Any] = {"scope": scope, "tag": where.tag, "text": where.text.lower(), "limit": limit}
    values |= {"offset": offset, "solved_min": where.solved_min, "solved_max": where.solved_max}
    direction = "DESC" if descending else "ASC"
    found = store.rows(
        f"WITH wanted AS (SELECT * FROM tried_row WHERE {_condition(where)}) SELECT *, (SELECT count(*) FROM wanted) "
        f"AS total FROM wanted ORDER BY {sort} {direction}, task_id LIMIT :limit OFFSET :offset",
        values,
    )
    page = {row["task_id"]: TaskRow(**{name: row[name] for name in _FIELDS}) for row in found}
    values |= {"tasks": json.dumps(list(page)), "any": ANY}
    by_step = (
        "SELECT task_id, step, 1.0 * sum(solved) / sum(usable) FROM tried_step WHERE :scope IN (:any, validation) "
        "AND task_id IN (SELECT value FROM json_each(:tasks)) GROUP BY task_id, step HAVING sum(usable) > 0 "
        "ORDER BY task_id, step"
    )
    for name, step, solved in store.rows(by_step, values):
        page[name].by_step.append((step, solved))
    return list(page.values()), (found[0]["total"] if found else 0)


_FIELDS = ("task_id", "attempts", "failed", "solved", "latest", "change", "reward", "last_step", "tag", "preview")


def _condition(where: TaskFilter) -> str:
    wanted = ["scope = :scope"]
    if where.text:
        wanted.append("(instr(lower(task_id), :text) OR instr(lower(preview), :text))")
    if where.tag:
        wanted.append("tag = :tag")
    if where.solved_min is not None:
        wanted.append("solved >= :solved_min")
    if where.solved_max is not None:
        wanted.append("solved <= :solved_max")
    return " AND ".join(wanted)


def task_history(store: EpisodeStore, task_id: str, threshold: float = 1.0, limit: int = 1000) -> list[dict[str, Any]]:
    """The newest attempts of a task, each with whether it was solved, in the order of recording."""
    found = store.rows(
        f"SELECT episode_id, step, validation, group_id, repeat, status, failure, reward, advantage, "
        f"{SOLVED} AS solved FROM episode WHERE task_id = :task ORDER BY id DESC LIMIT :limit",
        {"task": task_id, "threshold": threshold, "limit": limit},
    )
    return [{**dict(row), "validation": bool(row["validation"]), "solved": bool(row["solved"])} for row in found[::-1]]


# ---------------------------------------------------------------- reward histograms


@dataclass(slots=True)
class RewardHistogram:
    """Counts by step and bin, of the recorded episodes that have a reward."""

    bins: list[tuple[float, float]]
    """Lowest and highest reward of each, ascending. Equal: only that value."""
    steps: list[int]
    counts: list[list[int]]
    """Per step, the number of episodes in each bin."""
    width: int = 1
    """How many steps are counted together, under the first of them: more than one in a long run."""


class RewardCount(NamedTuple):
    """How many episodes of a step have this reward."""

    step: int
    reward: float
    episodes: int


def reward_counts(store: EpisodeStore) -> list[RewardCount]:
    """Count the rewards of a store's training episodes, by step."""
    found = store.rows(
        "SELECT step, reward, count(*) FROM episode WHERE validation = 0 AND reward IS NOT NULL "
        "AND status != 'cancelled' GROUP BY step, reward"
    )
    return [RewardCount(*row) for row in found]


def reward_histograms(runs: Sequence[Sequence[RewardCount]]) -> list[RewardHistogram]:
    """Make the histograms of several runs, all with the same bins, so that they can be compared."""
    values = sorted({found.reward for run in runs for found in run})
    bins = _bins(values)
    return [_histogram(run, values, bins) for run in runs]


def _histogram(run: Sequence[RewardCount], values: list[float], bins: list[tuple[float, float]]) -> RewardHistogram:
    numbers = [found.step for found in run]
    first = min(numbers, default=0)
    width = max(1, -(-(max(numbers, default=0) + 1 - first) // _COLUMNS))
    starts = {number: number - (number - first) % width for number in numbers}
    steps = sorted(set(starts.values()))
    counts = {step: [0] * len(bins) for step in steps}
    place = {value: index for index, value in enumerate(values)} if len(bins) == len(values) else None
    for step, reward, count in run:
        counts[starts[step]][place[reward] if place is not None else _range_of(reward, values)] += count
    return RewardHistogram(bins, steps, [counts[step] for step in steps], width)


def _bins(values: list[float]) -> list[tuple[float, float]]:
    if len(values) <= _MOST_VALUES:
        return [(value, value) for value in values]
    low, width = values[0], (values[-1] - values[0]) / _RANGES
    return [(low + index * width, low + (index + 1) * width) for index in range(_RANGES)]


def _range_of(reward: float, values: list[float]) -> int:
    low, high = values[0], values[-1]
    return min(_RANGES - 1, int((reward - low) / (high - low) * _RANGES))
