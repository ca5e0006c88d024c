"""Numbers of a run, a step at a time: the `MetricsSink` protocol, the file that is always written, and the fan-out.

A sink gets finite and non-finite floats under slash-separated names (`reward/mean`). Trackers live in `trackers.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ajet.observe.secrets import Masker


class MetricsSink(Protocol):
    """Where metrics go. A class of the user's own needs these two methods and `__init__(self, run: RunInfo)`."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of one step. Several calls for one step add up."""

    def close(self) -> None:
        """Deliver what is outstanding."""


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
    """`metrics.jsonl`: one line a step, written at once, so that whoever reads it sees the step as it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: dict[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        record.update((name, _plain(value)) for name, value in metrics.items())
        with self._path.open("a", encoding="utf-8") as file:  # opened anew: a rewind replaces the file
            file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, in order; a step that was run again after a resume counts as run last.

    A last line that is still being written is left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                record = json.loads(line)
                steps[record["step"]] = {**steps.pop(record["step"], {}), **record}
    return [steps[step] for step in sorted(steps)]


def rewind_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`: the run resumes there."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    scratch.replace(path)


def aggregate_log_metrics(many: Iterable[Mapping[str, Any]], prefix: str = "user") -> dict[str, float]:
    """What workflows put in `log_metrics`, over all episodes.

    Nested mappings become `a/b`; the numbers under a name (those of lists one by one, booleans as 0 and 1) give their
    mean, and where they differ and came in lists, `…/min` and `…/max`. Anything else has no mean and is left out.
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
        number = float(value)
        if math.isfinite(number):
            values.setdefault(name, []).append(number)


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity; they are written as text."""
    number = float(value)
    if math.isfinite(number):
        return int(number) if isinstance(value, int) else number
    return str(number)


def make_sinks(config: Any, folder: Path, masker: Masker) -> MetricsSink:
    """`metrics.jsonl`, and the trackers of `trainer_common.logger`.

    `console` and `file` name what is always there: the progress display and `metrics.jsonl`.
    """
    from ajet.observe.trackers import make_tracker

    ajet = config.ajet
    names = [name for name in dict.fromkeys(ajet.trainer_common.logger) if name not in ("console", "file")]
    trackers = [make_tracker(name, config, folder, masker) for name in names]
    return FanOut([JsonlSink(folder / "metrics.jsonl"), *trackers])
