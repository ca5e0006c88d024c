"""`PromptHistory`: what a search has written to `prompts/`, in the form that the page of candidates needs.

Reads `history.jsonl` and `best.yaml` as they are at this moment, in the middle of a search too. A line that can't be
read is left out, and named among the `problems`.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ajet.observe.run_files import read_regular
from ajet.schema.printable import encodable_values

FOLDER = "prompts"
_FORMAT = 1


class _Trial(msgspec.Struct):
    task: str
    reward: float | None = None
    success: float | None = None
    failure: str = ""
    fault: bool = False
    feedback: str = ""
    episodes: list[str] = []


class _Template(msgspec.Struct):
    text: str


class _Started(msgspec.Struct):
    algorithm: str = ""
    format: int = 0
    tasks: dict[str, list[str]] = {}
    queries: dict[str, str] = {}


class _Candidate(msgspec.Struct):
    id: str
    templates: dict[str, _Template]
    version: str = ""
    parents: list[str] = []
    made_by: str = ""
    feedback: str = ""
    round: int = 0
    read: list[_Trial] = []
    unfinished: bool = False
    """Its round isn't complete: it would be lost if the search ended now."""


class _Scores(msgspec.Struct):
    candidate: str
    purpose: str
    trials: list[_Trial] = []


class _NotShown(msgspec.Struct):
    reason: str
    round: int = 0
    kind: str = ""
    parents: list[str] = []
    texts: dict[str, str] = {}


class _Round(msgspec.Struct):
    round: int
    best: str
    score: float | None = None
    rounds: int | None = None
    spent: dict[str, float] = {}
    left: dict[str, float] | None = None
    partial: bool = False


class _Confirmed(msgspec.Struct):
    before: float
    after: float
    gain: float
    within_noise: bool


class _Ended(msgspec.Struct):
    reason: str = ""
    spent: dict[str, float] | None = None
    """With the confirmation."""


class _Best(msgspec.Struct):
    candidate: str


class _Story(msgspec.Struct):
    """What the lines say, in their order, as far as the page shows it."""

    started: _Started | None = None
    candidates: list[_Candidate] = []
    scores: list[_Scores] = []
    refused: list[_NotShown] = []
    rounds: list[_Round] = []
    confirmed: _Confirmed | None = None
    ended: _Ended | None = None
    best: _Best | None = None
    unfinished: bool = False
    """Lines follow the last complete round."""
    problems: list[str] = []


_LISTS: dict[str, tuple[str, type]] = {
    "candidate": ("candidates", _Candidate),
    "scores": ("scores", _Scores),
    "refused": ("refused", _NotShown),
    "round": ("rounds", _Round),
}
_ONCE: dict[str, type] = {"started": _Started, "confirmed": _Confirmed, "ended": _Ended}


class PromptHistory:
    """The `prompts/` of one experiment. Safe to use from any thread."""

    def __init__(self, experiment: Path) -> None:
        self._folder = experiment / FOLDER
        self._lock = threading.Lock()
        self._stamp = ""
        self._story: dict[str, Any] = {}

    @property
    def exists(self) -> bool:
        """Whether the run tunes prompts."""
        return self._folder.is_dir()

    def view(self, running: bool, known: str = "") -> dict[str, Any]:
        """All of it, with a `stamp`; only the stamp if that is what the reader already has."""
        with self._lock:
            stamp = f"{int(running)}-{self._state_of_files()}"
            if stamp != self._stamp:
                self._story, self._stamp = msgspec.to_builtins(self._read(running)), stamp
            same = {"stamp": stamp, "running": running}
            return same if known == stamp else {**same, **self._story}

    def _state_of_files(self) -> str:
        marks = []
        for name in ("history.jsonl", "best.yaml"):
            try:
                status = (self._folder / name).stat()
                marks.append(f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}")
            except OSError:
                marks.append("none")
        return "-".join(marks)

    def _read(self, running: bool) -> _Story:
        story, file = _Story(), self._folder / "history.jsonl"
        try:
            lines = read_regular(file).encode().splitlines(keepends=True) if file.exists() else []
        except OSError as error:
            story.problems.append(f"{file} can't be read: {error}")
            lines = []
        fresh: list[_Candidate] = []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                if not running:  # else it is being written
                    story.problems.append(f"{file}, line {number}: cut off while it was written, and left out")
                break
            try:
                event = _take(line, story, fresh)
            except (ValueError, RecursionError) as error:
                story.problems.append(f"{file}, line {number}: left out: {_why(error)}")
                continue
            if event in ("round", "confirmed", "ended"):
                fresh.clear()
                story.unfinished = False
            elif event not in ("started", "resumed"):
                story.unfinished = True
        for candidate in fresh:
            candidate.unfinished = True
        if lines and story.started is None:
            story.problems.append(f"{file} doesn't say how the search began: its `started` line is missing")
        elif story.started is not None and story.started.format != _FORMAT:
            story.problems.append(f"{file}: format {story.started.format}, and this version knows {_FORMAT}")
        self._read_best(story, running)
        return story

    def _read_best(self, story: _Story, running: bool) -> None:
        file = self._folder / "best.yaml"
        last = story.rounds[-1].best if story.rounds else ""
        try:
            story.best = msgspec.convert(yaml.safe_load(read_regular(file)), _Best, strict=False)
        except FileNotFoundError:
            if last and not running:
                story.problems.append(f"{file} is missing. The history says that {last} is the best")
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            story.problems.append(f"{file} is damaged: {_why(error)}")
        else:
            if last and story.best.candidate != last and not running:
                story.problems.append(
                    f"{file} names {story.best.candidate}, and the history {last}: the search was stopped between the "
                    "two. Resuming it puts that right"
                )


def _take(line: bytes, story: _Story, fresh: list[_Candidate]) -> str:
    """Add what a line says, and return its event. Raises ValueError if it isn't one."""
    record = encodable_values(json.loads(line))
    event = record.get("event") if isinstance(record, dict) else None
    if event in _LISTS:
        name, kind = _LISTS[event]
        found: Any = msgspec.convert(record, kind)
        getattr(story, name).append(found)
        if isinstance(found, _Candidate):
            fresh.append(found)
        elif isinstance(found, _Round):
            story.confirmed = story.ended = None  # the search went on
    elif event in _ONCE:
        setattr(story, event, msgspec.convert(record, _ONCE[event]))
    elif event != "resumed":
        raise ValueError(f"{event!r} is no event of a search")
    return str(event)


def _why(error: BaseException) -> str:
    return " ".join(str(error).split())
