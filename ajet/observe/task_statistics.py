"""How tasks fared over the steps: a page of the list of tasks, and the attempts of one task.

An attempt is an episode of the task; those that were stopped because nobody needed them any more don't count. One is
solved if the workflow or judge said so; where neither did, if its reward reaches the threshold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ajet.observe.episode_store import EpisodeStore

TaskSortKey = Literal["task_id", "attempts", "solved", "latest", "change", "reward", "last_step", "tag"]
TASK_SORT_KEYS: tuple[str, ...] = get_args(TaskSortKey)

_SOLVED = "CASE WHEN success IS NOT NULL THEN success WHEN reward IS NULL THEN 0 ELSE reward >= :threshold END"
_BY_STEP = f"""
  SELECT task_id, step, count(*) AS attempts, sum({_SOLVED}) AS solved, sum(coalesce(reward, 0)) AS reward,
    max(tag) AS tag, max(preview) AS preview
  FROM episode WHERE status != 'cancelled' AND {{where}} GROUP BY task_id, step"""


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks. None and '' match all."""

    text: str = ""
    """Part of the id or of the first words of the question."""
    tag: str = ""
    validation: bool | None = None
    """Count validation's attempts only (True), training's only (False), or all."""
    solved_min: float | None = None
    solved_max: float | None = None
    """Bounds of the share of all attempts that were solved."""


@dataclass(slots=True)
class TaskRow:
    """One task of the list."""

    task_id: str
    attempts: int
    solved: float
    """Share of its attempts that were solved."""
    latest: float
    """The same in its last step."""
    change: float
    """From its first step to its last."""
    reward: float
    """Mean reward; a failed attempt without one counts as 0, as in the metrics."""
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
    condition, values = _condition(where)
    direction = "DESC" if descending else "ASC"
    found = store.rows(
        f"""WITH by_step AS ({_BY_STEP.format(where=condition)}),
        task AS (SELECT task_id, sum(attempts) AS attempts, 1.0 * sum(solved) / sum(attempts) AS solved,
          sum(reward) / sum(attempts) AS reward, min(step) AS first_step, max(step) AS last_step, max(tag) AS tag,
          max(preview) AS preview FROM by_step GROUP BY task_id),
        row AS (SELECT task.*, 1.0 * last.solved / last.attempts AS latest,
          1.0 * last.solved / last.attempts - 1.0 * first.solved / first.attempts AS change FROM task
          JOIN by_step AS last ON last.task_id = task.task_id AND last.step = last_step
          JOIN by_step AS first ON first.task_id = task.task_id AND first.step = first_step)
        SELECT *, count(*) OVER () AS total FROM row WHERE solved BETWEEN :solved_min AND :solved_max
        ORDER BY {sort} {direction}, task_id LIMIT :limit OFFSET :offset""",
        {**values, "threshold": threshold, "limit": limit, "offset": offset},
    )
    rows = {row["task_id"]: TaskRow(**{name: row[name] for name in _FIELDS}) for row in found}
    values["tasks"] = json.dumps(list(rows))
    condition += " AND task_id IN (SELECT value FROM json_each(:tasks))"
    steps = store.rows(f"{_BY_STEP.format(where=condition)} ORDER BY step", {**values, "threshold": threshold})
    for step in steps:
        rows[step["task_id"]].by_step.append((step["step"], step["solved"] / step["attempts"]))
    return list(rows.values()), (found[0]["total"] if found else 0)


_FIELDS = ("task_id", "attempts", "solved", "latest", "change", "reward", "last_step", "tag", "preview")


def task_history(store: EpisodeStore, task_id: str, threshold: float = 1.0, limit: int = 1000) -> list[dict[str, Any]]:
    """The newest attempts of a task, each with whether it was solved, in the order of recording."""
    found = store.rows(
        f"SELECT episode_id, step, validation, group_id, repeat, status, failure, reward, advantage, "
        f"{_SOLVED} AS solved FROM episode WHERE task_id = :task ORDER BY id DESC LIMIT :limit",
        {"task": task_id, "threshold": threshold, "limit": limit},
    )
    return [{**dict(row), "validation": bool(row["validation"]), "solved": bool(row["solved"])} for row in found[::-1]]


def _condition(where: TaskFilter) -> tuple[str, dict[str, Any]]:
    clauses: list[str] = ["1"]
    values: dict[str, Any] = {
        "solved_min": 0.0 if where.solved_min is None else where.solved_min,
        "solved_max": 1.0 if where.solved_max is None else where.solved_max,
    }
    if where.text:
        clauses.append("(instr(lower(task_id), :text) OR instr(lower(preview), :text))")
        values["text"] = where.text.lower()
    if where.tag:
        clauses.append("tag = :tag")
        values["tag"] = where.tag
    if where.validation is not None:
        clauses.append("validation = :validation")
        values["validation"] = int(where.validation)
    return " AND ".join(clauses), values
