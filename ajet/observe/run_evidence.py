"""What the rules of `diagnosis` and the viewer's overview read of a run, and the `RunFinding` that a rule makes of it.

`Figures` holds metrics; `RunEvidence` adds the newest and the oldest training episodes, some of them decoded, the
config and the log. Nothing here judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ajet.observe.episode_store import EpisodeStore, RecordedEpisode

Values: TypeAlias = NDArray[np.float64]
"""One number for each step; NaN where a step has none."""

Level: TypeAlias = Literal["good", "quiet", "warn", "bad"]
LONGEST_WINDOW = 50
ERRORS = 2.0
"""A change is real if it is larger than so many standard errors."""
_FEWEST_FOR_CHANGE = 4
_FEWEST_STEPS_OF_EPISODES = 3
_MOST_ROWS = 512
_DECODED = 32
"""Bodies cost milliseconds, and a page waits for them."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One fault, or a remark (`quiet`, `good`)."""

    level: Level
    fault: str
    """A short stable name."""
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    episodes: tuple[str, ...] = ()
    """To open."""
    change: str = ""
    """The key to change and its new value, or what to do."""
    link: str = ""
    """The page below the run's that shows more."""
    from_start: bool = False
    """It was there in the first steps, so training hasn't brought it about."""
    follows_from: str = ""
    """The fault of another finding that explains this one."""

    @property
    def said(self) -> str:
        """The text, with what it may follow from."""
        return f"{self.text} It may follow from {self.follows_from}." if self.follows_from else self.text


class Series(NamedTuple):
    """The steps that have a metric, and its value in each."""

    steps: list[int]
    values: Values

    def part(self, start: int | None, end: int | None = None) -> Series:
        return Series(self.steps[start:end], self.values[start:end])

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def where(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first}–{last}"


class Trend(NamedTuple):
    """A metric in the first steps and in the last."""

    first: float
    last: float
    certain: float
    """A smaller difference may be chance."""
    where: str

    @property
    def risen(self) -> bool:
        return self.last - self.first > self.certain

    @property
    def fallen(self) -> bool:
        return self.first - self.last > self.certain


class Figures:
    """The metrics that the rules read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._steps = np.array(columns["steps"], np.int64)
        self._series: dict[str, list[float | None]] = columns["series"]
        self.any = len(self._steps) > 0
        self.window = max(1, min(LONGEST_WINDOW, len(self.of("episode/count").steps) // 5))
        """How many steps the beginning and the end of a run are."""

    def of(self, *names: str) -> Series:
        """The first of these metrics that has any value."""
        for name in names:
            values = np.array(self._series.get(name, []), np.float64)
            there = ~np.isnan(values)
            if there.any():
                return Series(self._steps[there].tolist(), values[there])
        return Series([], np.array([]))

    def total(self, name: str) -> float | None:
        """The sum over all steps; None if none has a value."""
        found = self.of(name)
        return float(found.values.sum()) if found.steps else None

    def lately(self, name: str) -> Series:
        """The last steps, as many as `window` says."""
        return self.of(name).part(-self.window)

    def change(self, name: str) -> Trend | None:
        """How much it changed from the first quarter of the steps to the last. None: there are too few."""
        series = self.of(name)
        count = len(series.steps)
        if count < _FEWEST_FOR_CHANGE:
            return None
        size = min(LONGEST_WINDOW, count // 4)
        first, last = series.part(0, size), series.part(-size)
        chance = float((np.diff(series.values) ** 2).mean() / 2)  # from one step to the next, learning changes little
        certain = ERRORS * math.sqrt(2 * chance / size)
        return Trend(first.mean, last.mean, certain, f"{first.where} and {last.where}")


class RunEvidence:
    """A run as the rules see it. The store is read only where a rule asks for episodes, and each part once."""

    def __init__(
        self,
        figures: Figures,
        store: EpisodeStore | None = None,
        config: Mapping[str, Any] | None = None,
        log: Iterable[Mapping[str, Any]] = (),
        threshold: float = 1.0,
    ) -> None:
        self.figures = figures
        self.store = store
        self.config = config or {}
        self.log = list(log)
        self.threshold = threshold
        """The reward from which an episode counts as solved if neither workflow nor judge said so."""

    def key(self, name: str) -> Any:
        """The value of `ajet.<name>` in the run's config; None if it isn't there."""
        return value_at(self.config, "ajet", *name.split("."))

    def solved(self, row: Mapping[str, Any]) -> bool:
        """Whether an episode counts as solved."""
        if row["success"] is not None:
            return bool(row["success"])
        return row["reward"] is not None and row["reward"] >= self.threshold

    @cached_property
    def early(self) -> list[dict[str, Any]]:
        """The rows of the first steps' training episodes."""
        return self._rows("ASC")

    @cached_property
    def late(self) -> list[dict[str, Any]]:
        """The same of the last steps."""
        return self._rows("DESC")

    def _rows(self, order: str) -> list[dict[str, Any]]:
        if self.store is None:
            return []
        steps = max(self.figures.window, _FEWEST_STEPS_OF_EPISODES)
        played = "validation = 0 AND status != 'cancelled'"
        query = (
            "SELECT episode_id, step, group_id, task_id, status, outcomes, failure, reward, success, sampled, calls "
            f"FROM episode WHERE {played} AND step IN (SELECT DISTINCT step FROM episode WHERE {played} "
            f"ORDER BY step {order} LIMIT :steps) ORDER BY id {order} LIMIT :limit"
        )
        return [dict(row) for row in self.store.rows(query, {"steps": steps, "limit": _MOST_ROWS})]

    @staticmethod
    def groups_of(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Group those that have a reward; groups of one say nothing, and are left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["group_id"] and row["reward"] is not None:
                found.setdefault(row["group_id"], []).append(row)
        return [group for group in found.values() if len(group) > 1]

    @cached_property
    def read(self) -> list[RecordedEpisode]:
        """Some of the late episodes, with all that they contain: of many groups, since those of one are alike."""
        if self.store is None:
            return []
        return [self.store.get(row["episode_id"]) for row in self.late[:: max(1, len(self.late) // _DECODED)]][
            :_DECODED
        ]

    def episodes(self, condition: str, **values: Any) -> tuple[str, ...]:
        """The newest episodes of a condition of ours, to open."""
        if self.store is None:
            return ()
        query = f"SELECT episode_id FROM episode WHERE {condition} ORDER BY id DESC LIMIT 3"
        return tuple(row[0] for row in self.store.rows(query, values))


def value_at(block: Any, *keys: str) -> Any:
    """The value at this path of nested mappings; None if there is none."""
    for key in keys:
        block = block.get(key) if isinstance(block, dict) else None
    return block


def changed(run: RunEvidence, name: str, factor: float) -> str:
    """A number of the config and what to set it to: `rollout.num_repeat: 4 → 8`."""
    value = run.key(name)
    if not isinstance(value, int | float):
        return name
    return f"{name}: {as_number(value)} → {as_number(value * factor)}"


def as_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def as_percent(share: float) -> str:
    return f"{100 * share:.3g} %"
