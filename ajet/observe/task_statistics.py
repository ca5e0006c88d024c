"""Statistics of recorded episodes: how tasks fared over the steps, and how rewards are spread in each step.

A page of tasks comes from the rows kept beside the episodes (`task_rows`). Where those don't serve, because an older
version wrote the file or the threshold is another one, the episodes are counted anew, with the same result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import ANY, ATTEMPTS, SOLVED, STEPS

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
    threshold: float = 1.0,
    sort: TaskSortKey = "task_id",
    descending: bool = False,
    offset: int = 0,
    limit: int = 100,
) -> tuple[list[TaskRow], int]:
    """The rows of one page, and the number of rows on all pages."""
    if sort not in TASK_SORT_KEYS:
        raise ValueError(f"can't sort by {sort!r}; sort keys: {', '.join(TASK_SORT_KEYS)}")
    rows, steps = _sources(store, where, threshold)
    scope = ANY if where.validation is None else int(where.validation)
    values = {"threshold": threshold, "scope": scope, "tag": where.tag, "text": where.text.lower(), "limit": limit}
    values |= {"offset": offset, "solved_min": where.solved_min, "solved_max": where.solved_max}
    direction = "DESC" if descending else "ASC"
    found = store.rows(
        f"WITH wanted AS (SELECT * FROM ({rows}) WHERE {_condition(where)}) SELECT *, (SELECT count(*) FROM wanted) "
        f"AS total FROM wanted ORDER BY {sort} {direction}, task_id LIMIT :limit OFFSET :offset",
        values,
    )
    page = {row["task_id"]: TaskRow(**{name: row[name] for name in _FIELDS}) for row in found}
    values["tasks"] = json.dumps(list(page))
    by_step = (
        f"SELECT task_id, step, 1.0 * sum(solved) / sum(usable) FROM ({steps}) WHERE task_id IN "
        "(SELECT value FROM json_each(:tasks)) GROUP BY task_id, step HAVING sum(usable) > 0 ORDER BY task_id, step"
    )
    for name, step, solved in store.rows(by_step, values):
        page[name].by_step.append((step, solved))
    return list(page.values()), (found[0]["total"] if found else 0)


_FIELDS = ("task_id", "attempts", "failed", "solved", "latest", "change", "reward", "last_step", "tag", "preview")
_KEPT = (
    "SELECT (SELECT value FROM tried_threshold) IS :threshold AND NOT EXISTS (SELECT 1 FROM tried_dirty) "
    "AND NOT (:tag != '' AND EXISTS (SELECT 1 FROM tried_row WHERE scope = :any AND mixed))"
)
"""Whether what is kept serves: a task whose attempts have several tags is counted with one of them by its episodes."""


def _sources(store: EpisodeStore, where: TaskFilter, threshold: float) -> tuple[str, str]:
    """Queries for the rows of tasks, and for their attempts by step."""
    validation = "" if where.validation is None else "AND validation = :scope"
    has_tables = store.rows("SELECT 1 FROM sqlite_master WHERE name = 'tried_threshold'")
    if has_tables and store.rows(_KEPT, {"threshold": threshold, "tag": where.tag, "any": ANY})[0][0]:
        return "SELECT * FROM tried_row WHERE scope = :scope", f"SELECT * FROM tried_step WHERE 1 {validation}"
    steps = (
        f"SELECT task_id, step, {ATTEMPTS} FROM episode WHERE status != 'cancelled' {validation} "
        f"{'AND tag = :tag' if where.tag else ''} GROUP BY task_id, step"
    )
    return _COUNTED.format(steps=steps), steps


_COUNTED = f"""WITH by_step AS ({{steps}}),
  whole AS (SELECT task_id, {STEPS}, min(step) AS first_step, max(step) AS last_step FROM by_step GROUP BY task_id)
  SELECT whole.task_id, whole.attempts, whole.attempts - whole.usable AS failed,
    1.0 * whole.solved / whole.usable AS solved, 1.0 * last.solved / last.usable AS latest,
    1.0 * last.solved / last.usable - 1.0 * first.solved / first.usable AS change,
    whole.reward / whole.usable AS reward, last_step, whole.last_tag AS tag, whole.preview
  FROM whole
  JOIN by_step AS first ON first.task_id = whole.task_id AND first.step = first_step
  JOIN by_step AS last ON last.task_id = whole.task_id AND last.step = last_step"""


def _condition(where: TaskFilter) -> str:
    wanted = ["1"]
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
    """Of a long run, so many steps are counted together, under the first of them."""


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
