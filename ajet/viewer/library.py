"""`Library`: the experiments in a folder, as the viewer reads them. Nothing here writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import is_running, read_events
from ajet.schema.errors import UserError

_MARKS = ("config.resolved.yaml", "metrics.jsonl", "episodes.sqlite")
"""A folder that contains one of these is an experiment."""
_LOG_TAIL_BYTES = 200_000
_SPARK_POINTS = 40


class NoExperimentsError(UserError):
    """There is nothing to show."""


class ExperimentNotFoundError(UserError):
    """There is no experiment of that name."""


class Library:
    """The experiments in a folder, or just one if the folder is itself an experiment. Safe to use from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.single = is_experiment(root)
        self._open: dict[str, Experiment] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """All experiments, the most recently written first."""
        if self.single:
            return [self.root.name]
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if path.is_dir() and is_experiment(path)]
        return [path.name for path in sorted(found, key=_touched, reverse=True)]

    def get(self, name: str) -> Experiment:
        """An experiment by name. The name is looked up, never used as a path."""
        with self._lock:
            if name in self._open and is_experiment(self._open[name].path):
                return self._open[name]
            if name not in self.names():
                raise ExperimentNotFoundError(f"no experiment {name!r} in {self.root}")
            experiment = Experiment(self.root if self.single else self.root / name)
            self._open[name] = experiment
            return experiment


class Experiment:
    """One experiment folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self._metrics = MetricsReader(path / "metrics.jsonl")
        self._store: EpisodeStore | None = None
        self._store_inode = 0
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return is_running(self.path)

    def metrics(self, after: int | None = None) -> dict[str, Any]:
        """`steps` and, for each metric, one value per step (null where a step has none)."""
        return self._metrics.columns(after)

    def store(self) -> EpisodeStore | None:
        """The recorded episodes; None if there are none yet."""
        file = self.path / "episodes.sqlite"
        with self._lock:
            inode = file.stat().st_ino if file.exists() else 0
            if inode != self._store_inode and self._store is not None:  # the run was started afresh
                self._store.close()
                self._store = None
            if self._store is None and inode:
                self._store, self._store_inode = EpisodeStore(file), inode
            return self._store

    def config(self) -> dict[str, Any]:
        """The resolved config, secrets masked."""
        file = self.path / "config.resolved.yaml"
        loaded = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
        return loaded if isinstance(loaded, dict) else {}

    def environment(self) -> dict[str, str]:
        """Commit, versions and machine; empty for a run of an older version."""
        file = self.path / "environment.json"
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return found

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.path / "events.jsonl")

    def log_tail(self) -> list[dict[str, Any]]:
        """The newest records of the log."""
        file = self.path / "run.log"
        if not file.exists():
            return []
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def summary(self) -> dict[str, Any]:
        """One line of the experiments list."""
        ajet = self.config().get("ajet") or {}
        columns = self.metrics()
        rewards, successes, validations = (
            [value for value in columns["series"].get(name, []) if isinstance(value, int | float)]
            for name in ("reward/mean", "success/rate", "val/reward/mean")
        )
        events = self.events()
        store = self.store()
        return {
            "name": self.name,
            "status": self._status(events),
            "model": (ajet.get("model") or {}).get("path", ""),
            "backbone": next((event["backbone"] for event in reversed(events) if event.get("backbone")), ""),
            "algorithm": ((ajet.get("trainer_common") or {}).get("algorithm") or {}).get("adv_estimator", ""),
            "step": columns["steps"][-1] if columns["steps"] else 0,
            "reward": rewards[-1] if rewards else None,
            "success": successes[-1] if successes else None,
            "validation": validations[-1] if validations else None,
            "spark": _thin(rewards),
            "episodes": store.facets().total if store else 0,
            "started": events[0]["time"] if events else None,
            "touched": _touched(self.path),
        }

    def _status(self, events: list[dict[str, Any]]) -> str:
        if self.running:
            return "running"
        last = next((event for event in reversed(events) if event["event"] in ("started", "resumed", "ended")), None)
        if last is None:
            return "unknown"
        return str(last.get("status", "completed")) if last["event"] == "ended" else "killed"


_ALWAYS_DIFFERENT = ("ajet.experiment_name", "ajet.experiment_dir", "ajet.project_name")


def differences(experiments: Sequence[Experiment]) -> dict[str, list[str]]:
    """The configuration keys in which runs differ, each with its value in every run."""
    flat = [dict(_flatten(experiment.config())) for experiment in experiments]
    keys = sorted({key for one in flat for key in one if key not in _ALWAYS_DIFFERENT})
    rows = {key: [one.get(key, "–") for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _flatten(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


class MetricsReader:
    """Reads `metrics.jsonl` into columns; when the file has grown, only the new part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._inode = 0
        self._steps: dict[int, dict[str, Any]] = {}

    def columns(self, after: int | None = None) -> dict[str, Any]:
        """Steps after `after` (all, if None). `generation` changes when earlier steps may have changed."""
        with self._lock:
            self._read()
            steps = sorted(step for step in self._steps if after is None or step > after)
            records = [self._steps[step] for step in steps]
            generation = self._inode
        names = sorted({name for record in records for name in record} - {"step"})
        series = {name: [_finite(record.get(name)) for record in records] for name in names}
        return {"steps": steps, "series": series, "generation": str(generation)}

    def _read(self) -> None:
        if not self._path.exists():
            self._start_over()
            return
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._start_over()
            self._inode = status.st_ino
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = json.loads(line)
                self._steps.setdefault(record["step"], {}).update(record)


def is_experiment(path: Path) -> bool:
    """Whether a folder contains what a run writes."""
    return any((path / mark).exists() for mark in _MARKS)


def _touched(path: Path) -> float:
    """When a run last wrote anything."""
    files = ("metrics.jsonl", "episodes.sqlite-wal", "episodes.sqlite", "events.jsonl", "config.resolved.yaml")
    return max((file.stat().st_mtime for file in map(path.joinpath, files) if file.exists()), default=0.0)


def _finite(value: Any) -> Any:
    return value if isinstance(value, int | float) else None


def _thin(values: list[float]) -> list[float]:
    if len(values) <= _SPARK_POINTS:
        return values
    return [values[round(index * (len(values) - 1) / (_SPARK_POINTS - 1))] for index in range(_SPARK_POINTS)]
