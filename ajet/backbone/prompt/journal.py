"""`PromptJournal`: `prompts/history.jsonl` and `prompts/best.yaml` of a run. `read_history`: what they say.
`TemplateComparison`: what they say of unseen tasks.

The history is only appended to, one JSON object a line. What follows the last complete round is dropped when the run
is resumed. `best.yaml` is replaced whole, after the round that found it is safe on disk: a killed run leaves the best
of its complete rounds.

| event | what |
|---|---|
| `started` | `format`, `algorithm`, `settings`, `version`, `tasks` (ids by purpose), `queries` (by task id) |
| `candidate` | `id`, `version`, `templates`, `parents`, `made_by`, `feedback`, `round`; `read`: trials |
| `scores` | `round`, `purpose`, `candidate`, `mean`, `trials`, `spent` |
| `refused` | `round`, `kind`, `parents`, `texts`, `reason` |
| `round` | `round`, `rounds`, `best`, `score`, `refused`, `spent`, `left`, `state`, `random`; `partial`: no budget |
| `resumed` | `spent`, also by the round that was dropped |
| `confirmed` | `start` and `best`: ids; the fields of a comparison; `within_noise` |
| `ended` | `reason`, `round`, `rounds`, `limits`, `spent` |

A trial has `task`, `reward`, `success`, `episodes` (ids) and, if there are, `failure` and `fault`. Those of `read`,
from which a candidate was written, have `feedback` too. The viewer shows all of it
(`ajet/observe/viewer/candidates.py`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from ajet.observe.logs import Masker
from ajet.observe.run_files import open_regular, read_regular
from ajet.observe.statistics import Gain
from ajet.prompt_tuning.proposal import Candidate
from ajet.prompt_tuning.search import Earlier
from ajet.prompt_tuning.trial import Purpose, Score, Trial, common_means
from ajet.schema.errors import FRESH, UserError
from ajet.schema.files import write_whole

FORMAT = 1
FOLDER = "prompts"
HISTORY = "history.jsonl"
BEST = "best.yaml"
_MASKED = ("reason", "feedback", "failure")
_TRIALS = ("trials", "read")


@dataclass(frozen=True, slots=True)
class TemplateComparison:
    """How much better the best templates are than those of the start, on the tasks that count for both."""

    before: float
    after: float
    gain: Gain

    @classmethod
    def of(cls, before: Score, after: Score) -> TemplateComparison | None:
        """Compare two scores. None: no task counts for both."""
        gain, (first, second) = Gain.of(before.values, after.values), common_means([before, after])
        if gain is None or first is None or second is None:
            return None
        return cls(first, second, gain)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TemplateComparison:
        interval, counts = (record["low"], record["high"]), (record["better"], record["worse"])
        gain = Gain(record["gain"], *interval, record["p"], record["tasks"], 0, *counts)
        return cls(record["before"], record["after"], gain)

    @property
    def within_noise(self) -> bool:
        """Whether chance alone may explain the difference."""
        return self.gain.low <= 0.0 <= self.gain.high or self.gain.p > 0.05

    def to_record(self) -> dict[str, Any]:
        gain = {name: getattr(self.gain, name) for name in ("tasks", "low", "high", "p", "better", "worse")}
        means = {"before": self.before, "after": self.after, "gain": self.gain.value}
        return {**means, **gain, "within_noise": self.within_noise}


class HistoryError(UserError):
    """A `history.jsonl` that can't be read."""


@dataclass(slots=True)
class History:
    """What a run's history says, up to its last complete round."""

    started: dict[str, Any] = field(default_factory=dict)
    """Empty: nothing worth keeping happened."""
    earlier: Earlier = field(default_factory=Earlier)
    spent: dict[str, Any] = field(default_factory=dict)
    """Also by a round that isn't complete."""
    best_score: Score | None = None
    confirmed: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    size: int = 0
    """Bytes of it that count."""


class PromptJournal:
    """The one writer of a run's `prompts/`."""

    def __init__(self, experiment: Path, masker: Masker | None = None) -> None:
        self.folder = experiment / FOLDER
        self.path = self.folder / HISTORY
        self.best = self.folder / BEST
        self._masker = masker or Masker()
        self._pending: tuple[Candidate, Score] | None = None
        self._file: TextIO | None = None

    def resume(self) -> History:
        """Drop what is not part of a complete round, and put `best.yaml` right. Raises `HistoryError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        history = read_history(self.path)
        if self.path.exists() and self.path.stat().st_size > history.size:
            os.truncate(self.path, history.size)
            if history.spent:
                self.commit("resumed", spent=history.spent)
        if history.best_score is not None:
            best = next(one for one in history.earlier.candidates if one.id == history.earlier.best)
            self._write_best(best, history.best_score, history.confirmed)
        return history

    def note(self, event: str, *, sync: bool = False, **fields: Any) -> None:
        """Append a line. `sync`: all of them are on the disk afterwards."""
        record = {
            "event": event,
            "time": round(time.time(), 3),
            **{key: self._masked(key, fields[key]) for key in fields},
        }
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record, ensure_ascii=True) + "\n")
        self._file.flush()  # a concurrent reader, such as the viewer, finds whole lines
        if sync:
            os.fsync(self._file.fileno())

    def commit(self, event: str, **fields: Any) -> None:
        """Append a line, and return when all lines and the best are on the disk."""
        self.note(event, sync=True, **fields)
        if self._pending is not None:
            self._write_best(*self._pending)
            self._pending = None

    def keep_best(self, candidate: Candidate, score: Score) -> None:
        """Written with the next commit."""
        self._pending = candidate, score

    def confirm(self, best: Candidate, score: Score, comparison: Mapping[str, Any]) -> None:
        self.note("confirmed", sync=True, **comparison)
        self._write_best(best, score, comparison)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _masked(self, key: str, value: Any) -> Any:
        if key in _MASKED and isinstance(value, str):
            return self._masker.text(value)
        return [{name: self._masked(name, one[name]) for name in one} for one in value] if key in _TRIALS else value

    def _write_best(self, candidate: Candidate, score: Score, confirmed: Mapping[str, Any] | None = None) -> None:
        record: dict[str, Any] = {
            "candidate": candidate.id,
            "version": candidate.version,
            "round": candidate.round,
            "score": score.mean,
            "tasks": len(score.values),
            "templates": candidate.to_record()["templates"],
        }
        if confirmed is not None:
            record["confirmed"] = {key: value for key, value in confirmed.items() if key not in ("event", "time")}
        write_whole(
            self.best,
            "# Written by ajet --backbone=prompt; `ajet export prompt` gives it as YAML keys.\n" + dump(record),
            durable=True,
        )


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are written as they read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    readable = "\n" in text and all(line == line.rstrip() for line in text.split("\n"))
    style = "|" if readable else None
    if "\x85" in text:  # PyYAML would write this line break as it is, and read a space
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(record: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(record), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read_best(experiment: Path) -> dict[str, Any]:
    """The `best.yaml` of a run. Raises `HistoryError`."""
    path = experiment / FOLDER / BEST
    try:
        record = yaml.safe_load(read_regular(path))
        if not isinstance(record, dict) or not isinstance(record["templates"], dict) or not record["templates"]:
            raise ValueError("it names no templates")
    except FileNotFoundError:
        raise HistoryError(
            f"{path}: no such file. `ajet --conf … --backbone=prompt` writes it once the first templates are validated"
        ) from None
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        raise HistoryError(f"{path} is damaged: {error}") from None
    return record


def read_history(path: Path) -> History:
    """Everything up to the last complete round. Raises `HistoryError`."""
    history, waiting = History(), _Waiting()
    if not path.exists():
        return history
    position = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # the process was killed while it wrote
            position += len(line)
            try:
                if _take(json.loads(line), history, waiting):
                    history.size = position
            except (ValueError, KeyError, TypeError) as error:
                raise HistoryError(
                    f"{path}, line {number}: {type(error).__name__}: {error}\n"
                    f"    repair the line, or start over with {FRESH}"
                ) from None
    return history


@dataclass(slots=True)
class _Waiting:
    """What counts once its round is complete."""

    started: dict[str, Any] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)


def _take(record: dict[str, Any], history: History, waiting: _Waiting) -> bool:
    """Whether what was read until now counts."""
    event = record["event"]
    if event == "started":
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} isn't {FORMAT}, which this version reads")
        waiting.started = record
    elif event == "candidate":
        waiting.candidates.append(Candidate.from_record(record))
    elif event == "resumed":
        history.spent = record["spent"]
        return True
    elif event == "scores":
        history.spent = record.get("spent", history.spent)
        if record["purpose"] == Purpose.VALIDATION:
            trials = tuple(Trial.from_record(one) for one in record["trials"])
            waiting.scores.append(Score(record["candidate"], Purpose.VALIDATION, trials))
    elif event == "round":
        earlier = history.earlier
        history.started, history.spent = waiting.started, record["spent"]
        history.confirmed = history.ended = None
        earlier.candidates += waiting.candidates
        earlier.scores += waiting.scores
        waiting.candidates, waiting.scores = [], []
        earlier.best, earlier.round, earlier.random_state = record["best"], record["round"], record["random"]
        if record["round"] and not record["partial"]:
            earlier.states.append(record["state"])
        history.best_score = next(score for score in reversed(earlier.scores) if score.candidate == earlier.best)
        return True
    elif event in ("confirmed", "ended"):
        if event == "confirmed":
            history.confirmed = record
        else:
            history.ended, history.spent = record, record.get("spent", history.spent)  # with the confirmation
        waiting.candidates, waiting.scores = [], []  # the budget ended their round before its first episode
        return True
    return False
