"""`Library`: the experiments in a folder, as the viewer reads them, and how they differ. Nothing here writes but the
notes.

A file that can't be read costs what it would have shown, and no more: the list goes on, and says what is wrong.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from ajet.config.yaml_source import parse_yaml
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import JUDGE, is_running, read_environment
from ajet.observe.metrics import flatten
from ajet.observe.progress_state import USED, RunningTotal
from ajet.observe.run_evidence import Figures, RunEvidence, value_at
from ajet.observe.run_files import Note, Notes, numbered_records, open_regular, read_events, read_regular, whole_record
from ajet.observe.statistics import Gain
from ajet.observe.viewer.candidates import PromptHistory
from ajet.observe.viewer.series import MetricsReader, Shown
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.user_code import holds

_T = TypeVar("_T")
_MARKS = ("config.resolved.yaml", "metrics.jsonl", "episodes.sqlite")
"""A folder that contains one of these is an experiment."""
_LOG_TAIL_BYTES = 200_000
_SPARK_POINTS = 40
_LISTED = ("return/mean", "success/rate", "val/return/mean")


class NoExperimentsError(UserError):
    """There is nothing to show."""


class ExperimentNotFoundError(UserError):
    """There is no experiment of that name."""


class DamagedExperimentError(UserError):
    """A file of an experiment can't be read. Names the file, and the line where there is one."""


class Library:
    """The experiments in a folder, or just one if the folder is itself an experiment. Safe to use from any thread."""

    def __init__(self, root: Path, trajectories: Path | None = None) -> None:
        """`trajectories`: the folder of trajectories that `root`, an experiment of our own, was made from."""
        self.root = root
        self.trajectories = trajectories
        self.why_no_notes = (
            "" if trajectories is None else "Notes are kept in experiment folders, not for trajectories."
        )
        self.single = is_experiment(root)
        self._open: dict[str, Experiment] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """All experiments, the most recently written first."""
        if self.single:
            return [_name_of(self.root)]
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if holds(Path.is_dir, path) and is_experiment(path)]
        return [path.name for path in sorted(found, key=_touched, reverse=True)]

    def get(self, name: str) -> Experiment:
        """An experiment by name, which is never used as a path."""
        with self._lock:
            if name in self._open and is_experiment(self._open[name].path):
                return self._open[name]
            if (folder := self._folder(name)) is None:
                raise ExperimentNotFoundError(f"no experiment {name!r} in {self.root}")
            experiment = Experiment(folder)
            self._open[name] = experiment
            return experiment

    def _folder(self, name: str) -> Path | None:
        """Where one of `names` is. To list them all each time would take minutes for thousands."""
        if self.single:
            return self.root if name == _name_of(self.root) else None
        path = self.root / name
        inside = path.parent == self.root and path.name == name != ".."
        return path if inside and holds(lambda folder: folder.is_dir() and is_experiment(folder), path) else None


def named_runs(text: str) -> list[str]:
    """The runs that an address like `?runs=one,other` names. A name is percent-encoded: it may contain a comma."""
    return [unquote(name) for name in text.split(",") if name]


class Reading:
    """Reads several things, and goes on when one of them can't be read."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def part(self, read: Callable[[], _T], otherwise: _T) -> _T:
        """What was read; if it can't be, `otherwise`, and the reason is among the problems."""
        try:
            return read()
        except (UserError, OSError) as error:
            if str(error) not in self.problems:  # several things are read from one file
                self.problems.append(str(error))
            return otherwise


class Experiment:
    """One experiment folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = _name_of(path)
        self.notes = Notes(path)
        self.prompts = PromptHistory(path)
        self._metrics = MetricsReader(path / "metrics.jsonl")
        self._store: EpisodeStore | None = None
        self._store_inode = 0
        self._lock = threading.Lock()
        self._config: tuple[tuple[int, int], dict[str, Any]] = ((0, 0), {})

    @property
    def running(self) -> bool:
        return is_running(self.path)

    def metrics(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """`steps` and, for each of these metrics (all, if None), one value per step (null where a step has none).
        `problem`: what of the file can't be read."""
        return self._metrics.columns(names)

    def metrics_in(self, reading: Reading, names: Collection[str] | None = None) -> dict[str, Any]:
        """The same, with what can't be read named in `reading`."""
        nothing: dict[str, Any] = {"steps": [], "series": {}, "problem": ""}
        columns = reading.part(lambda: self.metrics(names), nothing)
        reading.problems += filter(None, [columns["problem"]])
        return columns

    def chart(self, shown: Shown, known: str = "") -> dict[str, Any]:
        """What charts show of the metrics (`MetricsReader.chart`)."""
        return self._metrics.chart(shown, known)

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
        """The resolved config, secrets masked; parsed again only if the file is another one."""
        file = self.path / "config.resolved.yaml"
        if not file.exists():
            return {}
        status = file.stat()
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._config[0]:
            try:
                self._config = (stamp, parse_yaml(read_regular(file), str(file)).plain())
            except ConfigError as error:
                raise DamagedExperimentError(str(error)) from error
        return self._config[1]

    def keeps_a_selection(self) -> bool:
        """Whether only failed episodes and those that were cut short are recorded."""
        return bool(value_at(self.config(), "ajet", "recorder", "keep") == "failures")

    def success_threshold(self) -> float:
        """The reward from which an episode counts as solved if neither workflow nor judge said so."""
        given = value_at(self.config(), "ajet", "task_judge", "success_threshold")
        return float(given) if isinstance(given, int | float) else 1.0

    def environment(self) -> dict[str, str]:
        """Commit, versions and machine."""
        try:
            return read_environment(self.path)
        except (ValueError, RecursionError) as error:
            raise DamagedExperimentError(f"{self.path / 'environment.json'} is not JSON: {error}") from error

    def events(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.path / "events.jsonl") if "event" in event and "time" in event]

    def _left_out_events(self) -> list[str]:
        """What of the events can't be read, in words."""
        file = self.path / "events.jsonl"
        lines = [number for number, event in numbered_records(file) if event is None]
        more = f" ({len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        return [f"{file}, line {lines[0]}: not an event, and left out{more}"] if lines else []

    def log_tail(self) -> list[dict[str, Any]]:
        """The newest records of the log."""
        file = self.path / "run.log"
        if not file.exists():
            return []
        with open_regular(file) as stream:
            stream.seek(max(0, file.stat().st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")
        records = [line for line in lines if line.startswith("{") and line.endswith("}")]
        return [whole_record(f"{line}\n") or {"level": "damaged", "message": line} for line in records]

    def evidence(self, figures: Figures, reading: Reading) -> RunEvidence:
        """What the rules of `diagnosis` read. What can't be read is left out, and named in `reading`."""
        return RunEvidence(
            figures,
            reading.part(self.store, None),
            reading.part(self.config, dict[str, Any]()),
            reading.part(self.log_tail, list[dict[str, Any]]()),
            reading.part(self.success_threshold, 1.0),
        )

    def summary(self) -> dict[str, Any]:
        """One line of the experiments list. What can't be read is left out, and named under `problem`."""
        reading = Reading()
        config = reading.part(self.config, dict[str, Any]())
        columns = self.metrics_in(reading, (*_LISTED, *USED))
        returns, successes, validations = (
            [value for value in columns["series"].get(name, []) if isinstance(value, int | float)] for name in _LISTED
        )
        events = reading.part(self.events, list[dict[str, Any]]())
        reading.problems += reading.part(self._left_out_events, [])
        episodes = reading.part(self._count, 0)
        note = reading.part(lambda: self.notes.read().run, Note())
        return {
            "name": self.name,
            "status": reading.part(lambda: self._status(events), "unknown"),
            "model": _as_text(value_at(config, "ajet", "model", "path")),
            "backbone": _as_text(next((event["backbone"] for event in reversed(events) if event.get("backbone")), "")),
            "algorithm": _as_text(value_at(config, "ajet", "trainer_common", "algorithm", "adv_estimator")),
            "step": columns["steps"][-1] if columns["steps"] else 0,
            "return": returns[-1] if returns else None,
            "success": successes[-1] if successes else None,
            "validation": validations[-1] if validations else None,
            "spark": _thin(returns),
            "episodes": episodes,
            "total": RunningTotal.of_columns(columns).figures(),
            "started": events[0]["time"] if events else None,
            "touched": _touched(self.path),
            "note": note.note,
            "tags": note.tags,
            "problem": "; ".join(reading.problems),
        }

    def _count(self) -> int:
        """How many episodes there are. Of thousands of runs in a list, no file stays open."""
        file = self.path / "episodes.sqlite"
        if not file.exists():
            return 0
        with closing(EpisodeStore(file)) as store:
            return store.page(limit=0)[1]

    def _status(self, events: list[dict[str, Any]]) -> str:
        if self.running:
            return "running"
        last = next((event for event in reversed(events) if event["event"] in ("started", "resumed", "ended")), None)
        if last is None:
            return "unknown"
        return str(last.get("status", "completed")) if last["event"] == "ended" else "killed"


# ---------------------------------------------------------------- how runs differ

_ALWAYS_DIFFERENT = ("ajet.experiment_name", "ajet.experiment_dir", "ajet.project_name")


def differences(experiments: Sequence[Experiment]) -> dict[str, list[str]]:
    """The configuration keys in which runs differ, each with its value in every run."""
    flat = [{key: _text(value) for key, value in flatten(experiment.config())} for experiment in experiments]
    keys = sorted({key for one in flat for key in one if key not in _ALWAYS_DIFFERENT})
    rows = {key: [one.get(key, "–") for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def differently_judged(experiments: Sequence[Experiment]) -> str:
    """Why the rewards of these runs can't be compared; empty if nothing is known against it."""
    judges = [(one.name, one.environment().get(JUDGE, "")) for one in experiments]
    if len({judge for _, judge in judges if judge}) < 2:
        return ""
    known = "; ".join(f"{name}: {judge}" for name, judge in judges if judge)
    return f"These runs were scored differently, so their rewards can't be compared ({known})"


# ---------------------------------------------------------------- task by task

_SHOWN = 3
"""Tasks named on each side."""
_NEWEST = """
    SELECT step, task_id, avg(reward) AS reward FROM episode WHERE id IN (
      SELECT max(id) FROM episode WHERE validation = 1 AND reward IS NOT NULL AND status != 'cancelled'
      GROUP BY step, task_id, repeat)
    GROUP BY step, task_id ORDER BY step
"""
"""The mean reward of each task in each validation. Of an attempt that was played again, the newest counts."""


class MovedTask(NamedTuple):
    """A task and its mean reward before and after."""

    task_id: str
    query: str
    before: float
    after: float


@dataclass(slots=True)
class RunGain:
    """A run's validation against another, or against an earlier one of its own."""

    name: str
    against: str
    gain: Gain | None = None
    """None: the two have no task in common."""
    worse: list[MovedTask] = field(default_factory=list)
    """The tasks that lost most, the worst first."""
    better: list[MovedTask] = field(default_factory=list)


def run_gains(experiments: Sequence[Experiment]) -> list[RunGain]:
    """The last validation of each run against that of the first; of a single run, its last against its
    first. A run without a validation has none."""
    validations = [validation_rewards(experiment) for experiment in experiments]
    if len(experiments) == 1:
        (found,), (one,) = validations, experiments
        steps = sorted(found)
        if len(steps) < 2:
            return []
        first, last = steps[0], steps[-1]
        return [_gain(one, f"step {last}", f"step {first}", found[first], found[last])]
    ends = [found[max(found)] if found else {} for found in validations]
    return [
        _gain(experiment, experiment.name, experiments[0].name, ends[0], rewards)
        for experiment, rewards in zip(experiments[1:], ends[1:], strict=True)
        if ends[0] and rewards
    ]


def validation_rewards(experiment: Experiment) -> dict[int, dict[str, float]]:
    """The mean reward of each task in each recorded validation, by step. There are none where the episodes that went
    well weren't kept, and in a search for prompts, whose rounds try several candidates on the same tasks."""
    store, found = experiment.store(), dict[int, dict[str, float]]()
    mixed = experiment.prompts.exists or experiment.keeps_a_selection()
    for step, task, reward in store.rows(_NEWEST) if store is not None and not mixed else ():
        found.setdefault(step, {})[task] = reward
    return found


def _gain(
    experiment: Experiment, name: str, against: str, before: dict[str, float], after: dict[str, float]
) -> RunGain:
    shared = sorted(before.keys() & after.keys(), key=lambda task: (after[task] - before[task], task))
    worse = [task for task in shared[:_SHOWN] if after[task] < before[task]]
    better = [task for task in shared[: -_SHOWN - 1 : -1] if after[task] > before[task]]
    store = experiment.store()
    queries = _queries(store, [*worse, *better]) if store is not None else {}
    worst, best = (
        [MovedTask(task, queries.get(task, ""), before[task], after[task]) for task in tasks]
        for tasks in (worse, better)
    )
    return RunGain(name, against, Gain.of(before, after), worst, best)


def _queries(store: EpisodeStore, tasks: Sequence[str]) -> dict[str, str]:
    query = "SELECT task_id, query FROM task WHERE task_id IN (SELECT value FROM json_each(:tasks))"
    return dict(store.rows(query, {"tasks": json.dumps(list(tasks))}))


# ---------------------------------------------------------------- parts


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def is_experiment(path: Path) -> bool:
    """Whether a folder contains what a run writes."""
    try:
        return any((path / mark).exists() for mark in _MARKS)
    except OSError:  # a folder that we may not enter: listed, with the reason
        return True


def _name_of(path: Path) -> str:
    """The name under which a folder is shown: a link's own."""
    return path.resolve().name if path.name in ("", "..") else path.name


def _touched(path: Path) -> float:
    """When a run last wrote anything; 0 if that is unknown."""
    files = ("metrics.jsonl", "episodes.sqlite-wal", "episodes.sqlite", "events.jsonl", "config.resolved.yaml")
    try:
        return max((file.stat().st_mtime for file in map(path.joinpath, files) if file.exists()), default=0.0)
    except OSError:
        return 0.0


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _thin(values: list[float]) -> list[float]:
    if len(values) <= _SPARK_POINTS:
        return values
    return [values[round(index * (len(values) - 1) / (_SPARK_POINTS - 1))] for index in range(_SPARK_POINTS)]
