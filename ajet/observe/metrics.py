"""A run's metrics, step by step: the `MetricsSink` protocol, `metrics.jsonl`, and how metrics reach several sinks.

A sink gets finite and non-finite floats under slash-separated names (`reward/mean`). Trackers live in `trackers.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ajet.observe.line_file import LineFile, whole_record
from ajet.observe.secrets import Masker


class MetricsSink(Protocol):
    """Where metrics go. A user's own class needs these two methods and `__init__(self, run: RunInfo)`."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take metrics of a step. Several calls for one step add up."""

    def close(self) -> None:
        """Deliver what is pending."""


class FanOut:
    """Several sinks as one."""

    def __init__(self, sinks: Iterable[MetricsSink]) -> None:
        self.sinks = list(sinks)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class JsonlSink:
    """`metrics.jsonl`: one line per step, written as soon as the step ends."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record.update((name, _plain(value)) for name, value in metrics.items())
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, in order. Of a step that was run again after a resume, the later values count.

    A last line that is still being written is left out, and so is one that a full disk or a kill has cut off.
    """
    steps: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = whole_record(line)
            if record is not None and isinstance(record.get("step"), int):
                steps[record["step"]] = {**steps.pop(record["step"], {}), **record}
    return [steps[step] for step in sorted(steps)]


def rewind_metrics(path: Path, step: int) -> None:
    """The run resumes after `step`: drop the lines of later steps."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    scratch.replace(path)


def aggregate_log_metrics(many: Iterable[Mapping[str, Any]], prefix: str = "user") -> dict[str, float]:
    """What workflows put in `log_metrics`, averaged over episodes.

    Nested mappings become `a/b`. The numbers under a name (list items one by one, booleans as 0 and 1) are averaged; if
    they came in lists and differ, `…/min` and `…/max` are added. Values that aren't numbers are left out.
    """
    values: dict[str, list[float]] = {}
    listed: set[str] = set()
    for metrics in many:
        _collect(metrics, prefix, values, listed)
    result: dict[str, float] = {}
    for name, numbers in values.items():
        result[name] = sum(numbers) / len(numbers)
        if name in listed and min(numbers) != max(numbers):
            result[f"{name}/min"], result[f"{name}/max"] = min(numbers), max(numbers)
    return result


def _collect(value: Any, name: str, values: dict[str, list[float]], listed: set[str]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{name}/{key}", values, listed)
    elif isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", False)):
        listed.add(name)
        for item in value:
            _collect(item, name, values, listed)
    elif isinstance(value, int | float) or hasattr(value, "__float__"):
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):  # too large, or not a number after all
            return
        if math.isfinite(number):
            values.setdefault(name, []).append(number)


def _plain(value: float) -> float | str:
    """JSON has no NaN or infinity, so they are written as text."""
    number = float(value)
    if math.isfinite(number):
        return int(number) if isinstance(value, int) else number
    return str(number)


def make_sinks(config: Any, folder: Path, masker: Masker, *, with_trackers: bool = True) -> MetricsSink:
    """`metrics.jsonl`, and the trackers of `trainer_common.logger`.

    `console` and `file` in that list stand for what is always on: the progress display and `metrics.jsonl`.
    """
    from ajet.observe.trackers import make_tracker

    ajet = config.ajet
    names = [name for name in dict.fromkeys(ajet.trainer_common.logger) if name not in ("console", "file")]
    trackers = [make_tracker(name, config, folder, masker) for name in names if with_trackers]
    return FanOut([JsonlSink(folder / "metrics.jsonl"), *trackers])
