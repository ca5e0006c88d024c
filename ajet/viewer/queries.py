"""What a page's URL asks for: filters, sort and page. A malformed value is a 400 that says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from starlette.exceptions import HTTPException

from ajet.observe.episode_store import SORT_KEYS, EpisodeFilter, SortKey

PAGE_SIZE = 100
_LARGEST_PAGE = 1000


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """A page of the episodes list."""

    where: EpisodeFilter
    sort: SortKey
    descending: bool
    offset: int
    limit: int


def episode_query(values: Mapping[str, str]) -> EpisodeQuery:
    """The query of a URL like `?step_min=3&status=timeout&q=apples&sort=reward&order=asc`."""
    sort = values.get("sort", "id")
    if sort not in SORT_KEYS:
        raise HTTPException(400, f"sort={sort!r}: there are {', '.join(SORT_KEYS)}")
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
        text=values.get("q", ""),
    )
    return EpisodeQuery(
        where=where,
        sort=cast(SortKey, sort),
        descending=values.get("order", "desc") != "asc",
        offset=max(0, _integer(values, "offset") or 0),
        limit=min(_LARGEST_PAGE, max(1, _integer(values, "limit") or PAGE_SIZE)),
    )


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
        raise HTTPException(400, f"{name}={text!r} is no number") from None
    if number != number or abs(number) > 1e15:
        raise HTTPException(400, f"{name}={text!r} is out of range")
    return number


def _boolean(values: Mapping[str, str], name: str) -> bool | None:
    text = values.get(name, "")
    if text not in ("", "yes", "no"):
        raise HTTPException(400, f"{name}={text!r}: yes or no")
    return None if not text else text == "yes"
