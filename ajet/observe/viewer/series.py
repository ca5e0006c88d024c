"""`MetricsReader`: `metrics.jsonl` as columns, whole or thinned to as many points as a chart can show."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ajet.observe.run_evidence import Values
from ajet.observe.run_files import open_regular, whole_record

_LARGEST = 1e300
_LARGEST_STEP = 2**53
"""What a browser counts up to."""
_BUCKETS = 500
"""A chart is about so many pixels wide. Two points for each make a line on which every spike is seen."""
_RECORDED = "episode/count"
"""A step that has this metric logged all its counts: one that is missing was zero."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page's charts ask for."""

    names: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    """Metrics that are drawn on top of each other. Of several steps they are averaged, since extremes don't add up."""
    first: int | None = None
    last: int | None = None
    """The range of steps; None: up to the end."""
    smooth: float = 0.0
    """The weight of earlier steps in an exponential moving average."""


class MetricsReader:
    """Reads `metrics.jsonl`; when the file has grown, only the new part. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._inode = 0
        self._last = b""
        self._lines = 0
        self._problem = ""
        self._steps: list[int] = []
        self._rows: dict[int, int] = {}
        self._series: dict[str, list[float | None]] = {}
        self._undrawn: dict[str, set[int]] = {}
        """By metric, the steps at which it was NaN, infinite, or no number at all."""

    def columns(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """`steps` and the `series` of these metrics (all, if None). `problem`: what of the file can't be read."""
        with self._lock:
            self._read()
            wanted = sorted(self._series) if names is None else [name for name in names if name in self._series]
            series = {name: self._whole(name) for name in wanted}
            return {"steps": self._steps.copy(), "series": series, "problem": self._problem}

    def chart(self, shown: Shown, known: str = "") -> dict[str, Any]:
        """The names of all metrics, and these series in about 1,000 points; nothing if `known` is the present stamp.

        `width`: how many recorded steps two points stand for (1: each step has its own). `ends`: the first, highest and
        last value of each series, from all of its steps.
        """
        with self._lock:
            self._read()
            stamp = f"{self._inode}-{self._offset}"
            if known == stamp:
                return {"stamp": stamp, "unchanged": True}
            steps = self._steps.copy()
            numbers = {name: self._numbers(name) for name in dict.fromkeys((*shown.names, *shown.stacked))}
            logged = ~np.isnan(self._numbers(_RECORDED))
            names, problem = sorted(self._series), self._problem or self._gaps(numbers)
        low = 0 if shown.first is None else bisect_left(steps, shown.first)
        high = len(steps) if shown.last is None else bisect_right(steps, shown.last)
        width = -(-(high - low) // _BUCKETS) if high - low > 2 * _BUCKETS else 1
        series, ends = {}, {}
        for name, values in numbers.items():
            if name in shown.stacked:
                values[np.isnan(values) & logged] = 0.0
            values = (smoothed(values, shown.smooth) if shown.smooth else values)[low:high]
            series[name] = (_means if name in shown.stacked else _extremes)(values, width).tolist()
            ends[name] = _ends(values)
        places = _places(steps[low:high], width)
        return {
            "stamp": stamp, "names": names, "problem": problem, "first": steps[0] if steps else 0,
            "last": steps[-1] if steps else 0, "count": len(steps), "steps": places, "width": width,
            "series": {name: values[: len(places)] for name, values in series.items()}, "ends": ends,
        }  # fmt: skip

    def _gaps(self, names: Iterable[str]) -> str:
        found = [(name, steps) for name in names if (steps := self._undrawn.get(name))]
        return "; ".join(
            f"{name}: no finite number at {len(steps)} of {len(self._steps)} steps, last at {max(steps)}"
            for name, steps in found
        )

    def _whole(self, name: str) -> list[float | None]:
        values = self._series.get(name, [])
        return values + [None] * (len(self._steps) - len(values))

    def _numbers(self, name: str) -> Values:
        return np.array(self._whole(name), np.float64)

    def _read(self) -> None:
        if not self._path.exists():
            self._start_over()
            return
        with open_regular(self._path) as file:
            inode = self._path.stat().st_ino
            if inode != self._inode or not self._goes_on(file):
                self._start_over()
                self._inode = inode
            before = max(0, len(self._steps) - 1)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._lines += 1
                self._last = line
                self._take(line)
        if any(later < earlier for earlier, later in pairwise(self._steps[before:])):
            self._sort()

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether what was read still stands there. A new file may have the inode of a deleted one."""
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _take(self, line: bytes) -> None:
        """A line that holds no step is left out, and named."""
        record = whole_record(line.decode(errors="replace")) or {}
        step = record.pop("step", None)
        if type(step) is not int or abs(step) >= _LARGEST_STEP:
            self._problem = f"{self._path}, line {self._lines}: not a step's metrics, and left out"
            return
        row = self._rows.setdefault(step, len(self._steps))
        if row == len(self._steps):
            self._steps.append(step)
        for name, value in record.items():
            values = self._series.setdefault(name, [])
            while len(values) <= row:
                values.append(None)
            drawn = isinstance(value, int | float) and abs(value) < _LARGEST
            values[row] = value if drawn else None
            if not drawn:
                self._undrawn.setdefault(name, set()).add(step)
            elif name in self._undrawn:
                self._undrawn[name].discard(step)  # a later line of the step counts

    def _sort(self) -> None:
        """Put the rows in the order of their steps."""
        order = sorted(range(len(self._steps)), key=self._steps.__getitem__)
        for name in self._series:
            values = self._whole(name)
            self._series[name] = [values[row] for row in order]
        self._steps = [self._steps[row] for row in order]
        self._rows = {step: row for row, step in enumerate(self._steps)}


# ---------------------------------------------------------------- fewer points


def smoothed(values: Values, weight: float) -> Values:
    """Exponential moving average of the values that there are, corrected for the bias of its start."""
    total = share = 0.0
    found = []
    for value in values.tolist():
        if value == value:
            total = weight * total + (1 - weight) * value
            share = weight * share + (1 - weight)
        found.append(total / share if value == value else value)
    return np.array(found)


def _places(steps: Sequence[int], width: int) -> list[int]:
    """The steps at which the points stand: the beginning and the middle of each bucket."""
    if width == 1:
        return list(steps)
    last = len(steps) - 1
    pairs = ((start, min(start + width // 2, last)) for start in range(0, len(steps), width))
    return [steps[place] for pair in pairs for place in dict.fromkeys(pair)]


def _buckets(values: Values, width: int) -> Values:
    """A row for each `width` values; the last one is filled up with NaN."""
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, width)


def _extremes(values: Values, width: int) -> Values:
    """The lowest and the highest value of each bucket, in the order in which they occurred."""
    if width == 1:
        return values
    rows = _buckets(values, width)
    empty = np.isnan(rows)
    lowest, highest = np.where(empty, np.inf, rows).argmin(1), np.where(empty, -np.inf, rows).argmax(1)
    every = np.arange(len(rows))
    earlier, later = rows[every, np.minimum(lowest, highest)], rows[every, np.maximum(lowest, highest)]
    return np.stack([earlier, later], 1).ravel()


def _means(values: Values, width: int) -> Values:
    """The mean of each bucket, for both of its points."""
    if width == 1:
        return values
    rows = _buckets(values, width)
    there = ~np.isnan(rows)
    counts = there.sum(1)
    means = np.where(there, rows, 0.0).sum(1) / np.where(counts, counts, 1)
    return np.repeat(np.where(counts, means, np.nan), 2)


def _ends(values: Values) -> list[float] | None:
    found = values[~np.isnan(values)]
    return [float(found[0]), float(found.max()), float(found[-1])] if len(found) else None
