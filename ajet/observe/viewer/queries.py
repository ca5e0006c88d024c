"""What a page's address asks for: which episodes, which tasks, in which order. A 400 names a malformed value."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.exceptions import HTTPException

from ajet.observe.episode_store import SORT_KEYS, EpisodeFilter, SortKey
from ajet.observe.notes import Notes
from ajet.observe.task_statistics import TASK_SORT_KEYS, TaskFilter, TaskSortKey

_PAGE_SIZE = 100
_LARGEST_PAGE = 1000


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """Which page of the episodes list a URL asks for."""

    where: EpisodeFilter
    sort: SortKey
    descending: bool
    offset: int
    limit: int


def episode_query(values: Mapping[str, str], notes: Notes | None = None) -> EpisodeQuery:
    """Read a URL like `?step_min=3&status=timeout&q=apples&sort=reward&order=asc`. A 400 names a malformed value."""
    sort = values.get("sort", "id")
    if sort not in SORT_KEYS:
        raise HTTPException(400, f"sort={sort!r}: must be one of {', '.join(SORT_KEYS)}")
    where = EpisodeFilter(
        step_min=_integer(values, "step_min"),
        step_max=_integer(values, "step_max"),
        reward_min=_real(values, "reward_min"),
        reward_max=_real(values, "reward_max"),
        task=values.get("task", ""),
        group=values.get("group", ""),
        status=values.get("status", ""),
        agent=values.get("agent", ""),
        tag=values.get("tag", ""),
        failure=values.get("failure", ""),
        success=_boolean(values, "success"),
        validation=_boolean(values, "validation"),
        ids=_noted(values, notes),
        text=values.get("q", ""),
    )
    offset, limit = _place(values)
    return EpisodeQuery(
        where=where,
        sort=cast(SortKey, sort),
        descending=values.get("order", "desc") != "asc",
        offset=offset,
        limit=limit,
    )


def _noted(values: Mapping[str, str], notes: Notes | None) -> tuple[str, ...] | None:
    """The episodes that `?note=any` or `?note=tag:…` asks for."""
    kind, _, tag = values.get("note", "").partition(":")
    if kind not in ("", "any", "tag"):
        raise HTTPException(400, f"note={kind!r}: must be any or tag:…")
    return notes.read().tagged(tag) if kind and notes is not None else None


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """Which page of the list of tasks a URL asks for."""

    where: TaskFilter
    sort: TaskSortKey
    descending: bool
    offset: int
    limit: int


def task_query(values: Mapping[str, str]) -> TaskQuery:
    """Read a URL like `?q=apples&solved_max=0.5&sort=latest`."""
    sort = values.get("sort", "task_id")
    if sort not in TASK_SORT_KEYS:
        raise HTTPException(400, f"sort={sort!r}: must be one of {', '.join(TASK_SORT_KEYS)}")
    where = TaskFilter(
        text=values.get("q", "").strip(),
        tag=values.get("tag", ""),
        validation=_boolean(values, "validation"),
        solved_min=_real(values, "solved_min"),
        solved_max=_real(values, "solved_max"),
    )
    return TaskQuery(where, cast(TaskSortKey, sort), values.get("order", "asc") == "desc", *_place(values))


def _place(values: Mapping[str, str]) -> tuple[int, int]:
    """Offset and limit of a page."""
    offset = max(0, _integer(values, "offset") or 0)
    return offset, min(_LARGEST_PAGE, max(1, _integer(values, "limit") or _PAGE_SIZE))


def _integer(values: Mapping[str, str], name: str) -> int | None:
    number = _real(values, name)
    return None if number is None else int(number)


def _real(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise HTTPException(400, f"{name}={text!r} is not a number") from None
    if number != number or abs(number) > 1e15:
        raise HTTPException(400, f"{name}={text!r} is out of range")
    return number


def _boolean(values: Mapping[str, str], name: str) -> bool | None:
    text = values.get(name, "")
    if text not in ("", "yes", "no"):
        raise HTTPException(400, f"{name}={text!r}: must be yes or no")
    return None if not text else text == "yes"


EPISODE_COLUMNS = (
    "episode_id", "step", "validation", "task_id", "group_id", "repeat", "tag", "status", "failure", "reward",
    "advantage", "turns", "calls", "tokens", "sampled", "trained", "forks", "seconds",
)  # fmt: skip
TASK_COLUMNS = (
    "task_id",
    "tag",
    "attempts",
    "failed",
    "solved",
    "latest",
    "change",
    "reward",
    "last_step",
    "answer",
    "preview",
    "by_step",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would run a text that begins with one of these."""


def metrics_csv(columns: dict[str, Any]) -> str:
    """One row per step, one column per metric."""
    series = columns["series"]
    rows = [[step, *(values[index] for values in series.values())] for index, step in enumerate(columns["steps"])]
    return _csv(["step", *series], rows)


def episodes_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per episode."""
    return _csv(EPISODE_COLUMNS, [[row.get(name) for name in EPISODE_COLUMNS] for row in rows])


def tasks_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per task; `by_step` lists the share solved as `step:share`."""
    shown = [{**row, "by_step": " ".join(f"{step}:{share:.4g}" for step, share in row["by_step"])} for row in rows]
    return _csv(TASK_COLUMNS, [[row.get(name) for name in TASK_COLUMNS] for row in shown])


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_safe(name) for name in head])
    writer.writerows([_safe(value) for value in row] for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
