"""What a page's address asks for: which episodes, which tasks, in which order. A 400 names a malformed value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

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
