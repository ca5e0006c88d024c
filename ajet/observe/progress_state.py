"""`ProgressState`: what is known about a run right now, and `Display`, the base of what shows it.

Parts of it are the `FailureTally`, why episodes failed (each reason is logged the first time, and from then on
counted), and the `RunningTotal`, what the run has taken so far and will take in all. It follows from the metrics of the
steps, those that an earlier part of a resumed run wrote included: on the terminal, in the viewer and in `ajet runs`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ajet.observe.logs import ONLY_TO_FILE, TRACEBACK
from ajet.schema.episode import Episode, EpisodeStatus, Failure

log = logging.getLogger(__name__)

_LOGGED_AGAIN = frozenset({10, 100, 1000, 10_000, 100_000})
_LINE_CHARS = 300


@dataclass(slots=True)
class Failed:
    """Episodes that failed alike."""

    status: str
    latest: Failure
    count: int = 0

    @property
    def line(self) -> str:
        """`44 × workflow_error, KeyError: 'search', at agent.py:17 in execute`"""
        return f"{self.count:,} × {self.status}, {_short(self.latest.in_short)}"


class FailureTally:
    """A run's failures. They are alike if status, kind and place are the same. Any thread may add."""

    def __init__(self) -> None:
        self.episodes = 0
        """All that were looked at, except cancelled ones: a cancellation follows from something else."""
        self._lock = threading.Lock()
        self._alike: dict[tuple[str, str, str], Failed] = {}

    def add(self, episode: Episode) -> Failed | None:
        """Count an episode. Returns the failures like its own, or None if it didn't fail."""
        if episode.status is EpisodeStatus.CANCELLED:
            return None
        with self._lock:
            self.episodes += 1
            failure = episode.failure
            if failure is None:
                return None
            key = (str(episode.status), failure.kind, failure.place)
            failed = self._alike.setdefault(key, Failed(str(episode.status), failure))
            failed.latest = failure
            failed.count += 1
            return failed

    def add_and_log(self, episode: Episode, *, only_to_file: bool = False) -> None:
        """Count an episode, and log what is new: a failure the first time, with its traceback, then at 10, 100, …

        `only_to_file`: the terminal shows the episode anyway.
        """
        failed = self.add(episode)
        if failed is None or (failed.count > 1 and failed.count not in _LOGGED_AGAIN):
            return
        reason = _short(failed.latest.in_short)
        extra: dict[str, object] = {ONLY_TO_FILE: only_to_file}
        if failed.count > 1:
            log.warning("%s for the %dth time: %s", failed.status, failed.count, reason, extra=extra)
            return
        extra[TRACEBACK] = failed.latest.traceback
        log.warning("%s in episode %s: %s", failed.status, episode.episode_id, reason, extra=extra)

    @property
    def failed(self) -> list[Failed]:
        """Most frequent first."""
        with self._lock:
            return sorted(self._alike.values(), key=lambda failed: -failed.count)

    @property
    def failures(self) -> int:
        """How many episodes failed."""
        return sum(failed.count for failed in self.failed)

    def lines(self, most: int = 3) -> list[str]:
        """The most frequent failures, one line each, and how many others there are."""
        failed = self.failed
        others = sum(one.count for one in failed[most:])
        return [one.line for one in failed[:most]] + ([f"{others:,} × other failures"] if others else [])


def _short(text: str) -> str:
    return text if len(text) <= _LINE_CHARS else f"{text[: _LINE_CHARS - 1]}…"


HEADLINES = (
    ("return", "return/mean"),
    ("failed", "episode/failed_share"),
    ("success", "success/rate"),
    ("validation", "val/return/mean"),
    ("failed in validation", "val/failed_share"),
    ("loss", "train/loss"),
    ("kl", "train/kl"),
    ("entropy", "train/entropy"),
    ("tok/s", "perf/tokens_per_second"),
    ("time s", "time/step"),
)
"""The metrics in a step's line, and their short names; all others are in `metrics.jsonl`. A share of failed episodes is
shown if there is one."""


def headlines(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Those of `HEADLINES` that a step has, as short name and text."""
    shown = [(label, name) for label, name in HEADLINES if name in metrics]
    return [
        (label, f"{number(100 * metrics[name])} %" if name.endswith("_share") else number(metrics[name]))
        for label, name in shown
        if metrics[name] or not name.endswith("_share")
    ]


STEP, VALIDATION, TOTAL_STEPS, GPUS = "time/step", "time/validate", "perf/total_steps", "perf/gpus"
SAMPLED = ("episode/sampled_tokens_total", "val/episode/sampled_tokens_total")
HELPER = ("helper/calls", "helper/tokens", "helper/cost")
USED = (STEP, VALIDATION, TOTAL_STEPS, GPUS, *SAMPLED, *HELPER)
"""The metrics that it takes."""
_OF_STEPS = ("steps", "last", "total_steps", "warm_up")


@dataclass(slots=True)
class RunningTotal:
    """Add each line of `metrics.jsonl` as it is written."""

    seconds: float = 0.0
    """In steps and validations."""
    gpu_hours: float = 0.0
    """Accelerators × time."""
    sampled_tokens: float = 0.0
    """Those of validations included."""
    helper_calls: float = 0.0
    helper_tokens: float = 0.0
    helper_cost: float = 0.0
    """By `ajet.helper.price_per_million`."""
    steps: int = 0
    last: float = 0.0
    """The last one's number: more than `steps` if the run began with another's checkpoint."""
    total_steps: float = 0.0
    """0: not known."""
    warm_up: float = 0.0
    """Seconds up to the end of the first step, a validation before it included: they tell little about the others."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """A step's line, or that of a validation before the first step."""
        step, validation = _of(metrics, STEP), _of(metrics, VALIDATION)
        self.total_steps = _of(metrics, TOTAL_STEPS) or self.total_steps
        self.seconds += step + validation
        self.gpu_hours += (step + validation) * _of(metrics, GPUS) / 3600
        self.sampled_tokens += sum(_of(metrics, name) for name in SAMPLED)
        self.helper_calls += _of(metrics, HELPER[0])
        self.helper_tokens += _of(metrics, HELPER[1])
        self.helper_cost += _of(metrics, HELPER[2])
        if step:
            self.warm_up = self.warm_up or self.seconds
            self.steps += 1
            self.last = max(_of(metrics, "step"), self.steps)

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> RunningTotal:
        """All lines so far."""
        total = cls()
        for line in lines:
            total.add(line)
        return total

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> RunningTotal:
        """Sum `steps` and `series`, as the viewer reads them."""
        series = columns["series"]
        used = [name for name in USED if name in series]
        steps = enumerate(columns["steps"])
        return cls.of({"step": step, **{name: series[name][at] for name in used}} for at, step in steps)

    @property
    def expected_seconds(self) -> float | None:
        """How long all steps take, at the pace of those after the first. None: it isn't known, or not yet."""
        if not self.total_steps or self.steps < 2:
            return None
        pace = (self.seconds - self.warm_up) / (self.steps - 1)
        return self.seconds + max(0.0, self.total_steps - self.last) * pace

    def figures(self) -> dict[str, float]:
        """The figures by name; what was not used is left out."""
        kept = {name: value for name, value in asdict(self).items() if value and name not in _OF_STEPS}
        expected = self.expected_seconds
        return kept if expected is None else {**kept, "expected_seconds": expected}


def _of(metrics: Mapping[str, Any], name: str) -> float:
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass(slots=True)
class ProgressState:
    """What is known about the run right now."""

    experiment: str = ""
    backbone: str = ""
    unit: str = "step"
    """What a step is called: a search has rounds."""
    total_steps: int | None = None
    step: int = 0
    phase: str = ""
    phase_detail: str = ""
    """What the phase works on, if its name doesn't say."""
    phase_done: int = 0
    phase_total: int | None = None
    phase_began: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    episodes: int = 0
    tally: FailureTally = field(default_factory=FailureTally)
    recent_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    return_by_step: deque[float] = field(default_factory=lambda: deque(maxlen=240))
    loss_by_step: deque[float] = field(default_factory=lambda: deque(maxlen=240))
    validation_returns: list[float] = field(default_factory=list)
    time_by_phase: dict[str, float] = field(default_factory=dict)
    """Seconds spent in phases that have ended."""
    standing: str = ""
    """What is best so far, and what is left: of a run that searches."""
    viewer: str = ""
    """Where to look at the run: an address, or the command that gives one."""
    sampled_tokens: int = 0
    spent: RunningTotal = field(default_factory=RunningTotal)
    """What all steps took, those before a resume included."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the last step. None: too early to tell."""
        expected = self.spent.expected_seconds
        return None if expected is None else expected - self.spent.seconds


class Display:
    """Shows a state: this one, nothing. A kind overrides the events that it shows, which come with the lock of
    `Progress` held."""

    def started(self, state: ProgressState) -> None: ...
    def phase(self, state: ProgressState) -> None: ...
    def episode(self, state: ProgressState, episode: Episode) -> None: ...
    def validation(self, step: int, state: ProgressState) -> None: ...
    def step(self, state: ProgressState) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


ROUNDING = 1e-7


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float) -> str:
    """A metric with four significant digits. What rounding leaves of a sum of zero is zero."""
    if abs(value) < ROUNDING:
        return "0"
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3e}" if abs(value) < 1e-4 else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def time_text(total: Mapping[str, float]) -> str:
    """`3 min 20 s of 12 min 05 s`: so far, and in all if that is known. `total`: `RunningTotal.figures`."""
    spent, expected = total.get("seconds", 0.0), total.get("expected_seconds", 0.0)
    return duration(spent) + (f" of {duration(expected)}" if expected - spent >= 1 else "")


def cost_texts(total: Mapping[str, float]) -> list[str]:
    """What is paid for; nothing if nothing is."""
    texts = [f"{total['gpu_hours']:,.2f} GPU hours"] if "gpu_hours" in total else []
    if "helper_tokens" in total:
        price = f", {total['helper_cost']:,.2f}" if "helper_cost" in total else ""
        texts.append(f"helper {number(total['helper_tokens'])} tokens{price}")
    return texts


def total_text(total: Mapping[str, float]) -> str:
    """All of it, in a line."""
    tokens = [f"{number(total['sampled_tokens'])} sampled tokens"] if "sampled_tokens" in total else []
    return ", ".join([time_text(total), *tokens, *cost_texts(total)])
