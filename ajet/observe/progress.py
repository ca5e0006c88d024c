"""`Progress`: what a run shows on the terminal while it goes.

A live display on a terminal, plain lines elsewhere, JSON lines with `--json`, only errors with `--quiet`. Any thread
may call any method. It shows; it keeps nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import IO, Any, Protocol

from ajet.schema.episode import Episode


class ProgressMode(StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    """`live` on a terminal, else `plain`."""
    LIVE = "live"
    PLAIN = "plain"
    JSON = "json"
    """One JSON object a line on stdout, for programs."""
    QUIET = "quiet"


@dataclass(slots=True)
class ProgressState:
    """What is known of the run at this moment."""

    experiment: str = ""
    backbone: str = ""
    total_steps: int | None = None
    step: int = 0
    steps_this_run: int = 0
    phase: str = ""
    phase_done: int = 0
    phase_total: int | None = None
    phase_began: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)
    stepping_began: float = field(default_factory=time.monotonic)
    episodes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    recent_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    reward_by_step: deque[float] = field(default_factory=lambda: deque(maxlen=240))
    sampled_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the last step, at the pace of this run so far."""
        if not self.total_steps or not self.steps_this_run:
            return None
        pace = (time.monotonic() - self.stepping_began) / self.steps_this_run
        return pace * max(0, self.total_steps - self.step)


class Display(Protocol):
    """Shows a state. Called under the progress's lock."""

    def started(self, state: ProgressState) -> None: ...
    def phase(self, state: ProgressState) -> None: ...
    def advanced(self, state: ProgressState) -> None: ...
    def episode(self, state: ProgressState, episode: Episode) -> None: ...
    def step(self, state: ProgressState) -> None: ...
    def message(self, text: str, level: str) -> None: ...
    def close(self) -> None: ...


class Progress:
    """What the conductor of a run reports. `with Progress.create(...) as progress:`"""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._lock = threading.RLock()
        self.state = ProgressState()

    @classmethod
    def create(cls, mode: ProgressMode | str = ProgressMode.AUTO, stream: IO[str] | None = None) -> Progress:
        """A progress in this mode, on `stream` (default: stdout)."""
        from ajet.observe.progress_plain import JsonDisplay, PlainDisplay, QuietDisplay

        stream = stream or sys.stdout
        mode = ProgressMode(mode)
        if mode is ProgressMode.AUTO:
            mode = ProgressMode.LIVE if stream.isatty() else ProgressMode.PLAIN
        if mode is ProgressMode.LIVE:
            from ajet.observe.progress_live import LiveDisplay

            return cls(LiveDisplay(stream))
        displays: dict[ProgressMode, Callable[[IO[str]], Display]] = {
            ProgressMode.JSON: JsonDisplay,
            ProgressMode.QUIET: QuietDisplay,
        }
        return cls(displays.get(mode, PlainDisplay)(stream))

    def start(self, experiment: str, backbone: str, total_steps: int | None = None, step: int = 0) -> None:
        """The run begins (`step` > 0: resumes after that step)."""
        with self._lock:
            self.state.experiment, self.state.backbone = experiment, backbone
            self.state.total_steps, self.state.step = total_steps, step
            self.state.stepping_began = time.monotonic()
            self._display.started(self.state)

    def phase(self, name: str, total: int | None = None) -> None:
        """A part of the step begins (rollout, judge, train, sync, validate, …) with `total` units to do, if known."""
        with self._lock:
            self.state.phase, self.state.phase_total, self.state.phase_done = name, total, 0
            self.state.phase_began = time.monotonic()
            self._display.phase(self.state)

    def advance(self, count: int = 1) -> None:
        """That many units of the phase are done. (`episode` advances by itself.)"""
        with self._lock:
            self.state.phase_done += count
            self._display.advanced(self.state)

    def episode(self, episode: Episode) -> None:
        """An episode ended."""
        with self._lock:
            state = self.state
            state.episodes += 1
            state.phase_done += 1
            state.sampled_tokens += episode.tree.sampled_tokens
            if episode.reward is not None:
                state.recent_rewards.append(float(episode.reward))
            if episode.failure is not None:
                kind = str(episode.status)
                state.failures[kind] = state.failures.get(kind, 0) + 1
            self._display.episode(state, episode)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step ended, with these metrics."""
        with self._lock:
            state = self.state
            state.step, state.metrics = step, metrics
            state.steps_this_run += 1
            if "reward/mean" in metrics:
                state.reward_by_step.append(metrics["reward/mean"])
            self._display.step(state)

    def message(self, text: str, level: str = "info") -> None:
        """A line for the reader. `level`: info | warning | error."""
        with self._lock:
            self._display.message(text, level)

    def close(self) -> None:
        with self._lock:
            self._display.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float) -> str:
    """A metric as a reader likes it: four significant digits."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3e}" if abs(value) < 1e-4 else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def json_line(**fields: Any) -> str:
    """One JSON object on one line."""
    return json.dumps(fields, default=str) + "\n"
