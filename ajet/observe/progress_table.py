"""`StepTable`: a line per step in aligned columns, as many as the terminal is wide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEP_WIDTH = 9
CELL_WIDTH = 8
GAP = "  "
HEADER_EVERY = 20
"""Rows between two headers: one is always on the screen."""


def ratio(value: float) -> str:
    """Three decimals, so that the column's points stand below each other."""
    return f"{value:.3f}" if abs(value) < 1000 and (abs(value) >= 0.001 or not value) else f"{value:.1e}"


def count(value: float) -> str:
    """A whole number, in thousands or millions if it is too long."""
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if abs(value) < 1e8 else f"{value / 1e6:,.0f}M"


def share(value: float) -> str:
    """Of 1, without the space that would split the column."""
    return f"{value:.0%}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table."""

    label: str
    metric: str
    rank: int
    """Those of low rank are shown first, if there is no room for all."""
    shown: Callable[[float], str] = ratio
    late: bool = False
    """Only some steps have it, so the first one doesn't decide whether it is shown."""


COLUMNS = (
    Column("return", "return/mean", 0),
    Column("success", "success/rate", 1),
    Column("valid.", "val/return/mean", 2, late=True),
    Column("v. failed", "val/failed_share", 15, share, late=True),
    Column("turns", "episode/turns", 8),
    Column("reply", "episode/reply_length", 9, count),
    Column("loss", "train/loss", 3),
    Column("kl", "train/kl", 6),
    Column("entropy", "train/entropy", 7),
    Column("grad", "train/grad_norm", 10),
    Column("clip", "train/clip_fraction", 13),
    Column("lr", "train/lr", 14),
    Column("failed", "episode/failed_share", 4, share),
    Column("tok/s", "perf/tokens_per_second", 11, count),
    Column("rollout s", "time/rollout", 12, seconds),
    Column("train s", "time/train", 12, seconds),
    Column("step s", "time/step", 5, seconds),
)
"""From left to right."""


class StepTable:
    """Gives the lines of the table, one step at a time. Its columns are those of the first step that find room."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._width = 0
        self._rows = 0
        self._known: set[str] = set()

    def lines(self, step: str, metrics: Mapping[str, float], width: int, unit: str = "step") -> tuple[str, str]:
        """The header, or '' if it is still on the screen, and the row of a step."""
        header = ""
        fresh = {column.metric for column in COLUMNS if column.metric in metrics and not column.late} - self._known
        if width != self._width or fresh or self._rows >= HEADER_EVERY:
            self._known |= fresh
            self._columns, self._width, self._rows = _fitting(self._known, width), width, 0
            header = self._line(unit, [column.label for column in self._columns])
        self._rows += 1
        cells = [column.shown(metrics[column.metric]) if column.metric in metrics else "" for column in self._columns]
        return header, self._line(step, cells)

    def _line(self, step: str, cells: list[str]) -> str:
        widths = [max(CELL_WIDTH, len(column.label)) for column in self._columns]
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return GAP.join([f"{step:>{STEP_WIDTH}}", *padded]).rstrip()


def _fitting(known: set[str], width: int) -> list[Column]:
    """The columns to show: by rank as many as fit, in their order from left to right."""
    room = width - STEP_WIDTH
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        needed = len(GAP) + max(CELL_WIDTH, len(column.label))
        if (column.metric in known or column.late) and needed <= room:
            chosen.append(column)
            room -= needed
    return [column for column in COLUMNS if column in chosen]
