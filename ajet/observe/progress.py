"""`Progress`: what a run shows while it is going on.

A live display on a terminal (`progress_live.py`, which loads rich), an HTML block in a notebook, plain lines elsewhere,
JSON lines with `--json`, nothing with `--quiet`. Any thread may call any method. It writes no files.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from enum import StrEnum
from html import escape
from types import TracebackType
from typing import IO, Any

from ajet.observe.metrics import as_json
from ajet.observe.progress_state import (
    TOTAL_STEPS,
    Display,
    ProgressState,
    cost_texts,
    duration,
    headlines,
    number,
    total_text,
)
from ajet.schema.episode import Episode
from ajet.schema.printable import printable

_LINE_EVERY_S = 10.0
"""How often, at most, plain output reports progress within a phase: keeps CI logs short."""
_REDRAW_EVERY_S = 0.5
"""How often, at most, a notebook's block is drawn anew: each time is a message to the browser."""
_MESSAGES = 8
"""How many of the latest messages a notebook shows."""


class ProgressMode(StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    """`live` on a terminal, HTML in a notebook, otherwise `plain`."""
    LIVE = "live"
    PLAIN = "plain"
    JSON = "json"
    """One JSON object per line on stdout, for programs."""
    QUIET = "quiet"
    """Nothing: errors are the log's."""


class Progress:
    """What a run reports: `with Progress.create(...) as progress:`"""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._lock = threading.RLock()
        self.state = ProgressState()

    @classmethod
    def create(cls, mode: ProgressMode | str = ProgressMode.AUTO, stream: IO[str] | None = None) -> Progress:
        """A progress display in this mode, on `stream` (default: stdout)."""
        stream = stream or sys.stdout
        mode = ProgressMode(mode)
        if mode is ProgressMode.AUTO:
            if in_notebook():
                return cls(NotebookDisplay())
            mode = ProgressMode.LIVE if stream.isatty() else ProgressMode.PLAIN
        if mode is ProgressMode.LIVE:
            from ajet.observe.progress_live import LiveDisplay

            return cls(LiveDisplay(stream))
        if mode is ProgressMode.QUIET:
            return cls(Display())
        return cls(JsonDisplay(stream) if mode is ProgressMode.JSON else PlainDisplay(stream))

    def start(
        self,
        experiment: str,
        backbone: str,
        total_steps: int | None = None,
        step: int = 0,
        viewer: str = "",
        unit: str = "step",
    ) -> None:
        """The run begins (`step` > 0: it resumes after that step). `unit`: what its steps are called."""
        with self._lock:
            self.state.experiment, self.state.backbone = experiment, backbone
            self.state.total_steps, self.state.step = total_steps, step
            self.state.viewer, self.state.unit = viewer, unit
            self._display.started(self.state)

    def phase(self, name: str, total: int | None = None, detail: str = "") -> None:
        """A phase begins (load, rollout, train, validate, …) with `total` units to do, if known. `detail`: on what."""
        with self._lock:
            state, now = self.state, time.monotonic()
            if state.phase:
                state.time_by_phase[state.phase] = state.time_by_phase.get(state.phase, 0.0) + now - state.phase_began
            state.phase, state.phase_detail, state.phase_total, state.phase_done = name, detail, total, 0
            state.phase_began = now
            self._display.phase(state)

    def episode(self, episode: Episode) -> None:
        """An episode ended. Why it failed, if it did, is logged: the first time, then counted."""
        self.state.tally.add_and_log(episode)
        with self._lock:
            state = self.state
            state.episodes += 1
            state.phase_done += 1
            if state.phase_total is not None:  # episodes that a fault ended are replaced
                state.phase_total = max(state.phase_total, state.phase_done)
            state.sampled_tokens += episode.tree.sampled_tokens
            if episode.reward is not None:
                state.recent_rewards.append(float(episode.reward))
            self._display.episode(state, episode)

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """A validation of the weights after this step ended with these metrics. The step itself may not be reported
        yet."""
        with self._lock:
            if "val/return/mean" in metrics:
                self.state.validation_returns.append(metrics["val/return/mean"])
                self.state.metrics = metrics
                self._display.validation(step, self.state)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step ended with these metrics."""
        with self._lock:
            state = self.state
            state.step, state.metrics = step, metrics
            state.spent.add({"step": step, TOTAL_STEPS: state.total_steps, **metrics})
            if "return/mean" in metrics:
                state.return_by_step.append(metrics["return/mean"])
            if "train/loss" in metrics:
                state.loss_by_step.append(metrics["train/loss"])
            self._display.step(state)

    def standing(self, text: str) -> None:
        """Show what is best so far, and what is left."""
        with self._lock:
            self.state.standing = text

    def message(self, text: str) -> None:
        """Show a line of text."""
        with self._lock:
            self._display.message(text)

    def close(self) -> None:
        with self._lock:
            self._display.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def still_open(stream: IO[str]) -> IO[str]:
    """This stream, or standard output as it is now, if a workflow has closed it."""
    return sys.stdout if stream.closed else stream


class PlainDisplay(Display):
    """One line per step, validation and phase that loads something, and one every ten seconds within a phase."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last_line = time.monotonic()

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(printable(text), file=still_open(self._stream), flush=True)

    def started(self, state: ProgressState) -> None:
        plural = "" if state.total_steps == 1 else "s"
        steps = f", {state.total_steps} {state.unit}{plural}" if state.total_steps else ""
        resumed = f", resumed after {state.unit} {state.step}" if state.step else ""
        self._line(f"{state.experiment} ({state.backbone}{steps}{resumed})")

    def phase(self, state: ProgressState) -> None:
        self._last_line = time.monotonic()
        if state.phase_detail:
            self._line(f"{state.phase}: {state.phase_detail}")

    def episode(self, state: ProgressState, episode: Episode) -> None:
        if time.monotonic() - self._last_line >= _LINE_EVERY_S:
            total = f"/{state.phase_total}" if state.phase_total else ""
            self._line(f"  {state.phase} {state.phase_done}{total}")

    def validation(self, step: int, state: ProgressState) -> None:
        """Print a line for a step that this run doesn't report; else it is part of its step's line."""
        if step == state.step:
            success = state.metrics.get("val/success")
            said = f"validation {number(state.validation_returns[-1])}"
            solved = f"  success {number(success)}" if success is not None else ""
            self._line(f"{state.unit} {state.step}  {said}{solved}")

    def step(self, state: ProgressState) -> None:
        shown = [f"{label} {text}" for label, text in headlines(state.metrics)]
        total = f"/{state.total_steps}" if state.total_steps else ""
        eta = state.eta_seconds
        rest = [f"eta {duration(eta)}"] if eta and eta >= 1 else []
        rest += cost_texts(state.spent.figures())
        self._line("  ".join([f"{state.unit} {state.step}{total}", *shown, *rest]))

    def message(self, text: str) -> None:
        self._line(text)


class JsonDisplay(Display):
    """One JSON object per line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def _write(self, **fields: object) -> None:
        print(
            json.dumps({"time": round(time.time(), 3), **fields}, default=str),
            file=still_open(self._stream),
            flush=True,
        )

    def started(self, state: ProgressState) -> None:
        self._write(
            event="started",
            experiment=state.experiment,
            backbone=state.backbone,
            total_steps=state.total_steps,
            step=state.step,
        )

    def phase(self, state: ProgressState) -> None:
        fields = {"phase": state.phase, "detail": state.phase_detail, "total": state.phase_total, "step": state.step}
        self._write(event="phase", **fields)

    def episode(self, state: ProgressState, episode: Episode) -> None:
        failure = {"kind": episode.failure.kind, "message": episode.failure.message} if episode.failure else None
        self._write(
            event="episode",
            episode=episode.episode_id,
            task=episode.task_id,
            status=str(episode.status),
            reward=episode.reward,
            calls=len(episode.tree.calls),
            failure=failure,
        )

    def validation(self, step: int, state: ProgressState) -> None:
        self._write(event="validation", step=step, metrics=as_json(state.metrics))

    def step(self, state: ProgressState) -> None:
        self._write(event="step", step=state.step, metrics=as_json(state.metrics), total=state.spent.figures())

    def message(self, text: str) -> None:
        self._write(event="message", level="info", text=text)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookDisplay(Display):
    """An HTML block in a notebook, drawn anew in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines: deque[str] = deque(maxlen=_MESSAGES)
        self._drawn = 0.0
        self._state = ProgressState()

    def started(self, state: ProgressState) -> None:
        self._state = state
        from IPython.display import HTML, display

        self._handle = display(HTML(self._html(state)), display_id=True)  # type: ignore[no-untyped-call]

    def phase(self, state: ProgressState) -> None:
        self._draw(state)

    def episode(self, state: ProgressState, episode: Episode) -> None:
        self._draw(state)

    def step(self, state: ProgressState) -> None:
        self._draw(state, now=True)

    def validation(self, step: int, state: ProgressState) -> None:
        self._draw(state, now=True)

    def message(self, text: str) -> None:
        self._lines.append(text)

    def close(self) -> None:
        if self._handle is not None:
            self._draw(self._state, now=True)

    def _draw(self, state: ProgressState, *, now: bool = False) -> None:
        self._state = state
        if self._handle is None or not (now or time.monotonic() - self._drawn > _REDRAW_EVERY_S):
            return
        from IPython.display import HTML

        self._drawn = time.monotonic()
        self._handle.update(HTML(self._html(state)))  # type: ignore[no-untyped-call]

    def _html(self, state: ProgressState) -> str:
        total = state.total_steps or 0
        eta = state.eta_seconds
        left = f", {duration(eta)} left" if eta and eta >= 1 else ""
        rows = [(f"{state.unit}s", f"{_cells(state.step, total)} {state.step}/{total or '?'}{left}")]
        if state.spent.steps:
            rows.append(("in all", escape(total_text(state.spent.figures()))))
        if state.standing:
            rows.append(("best", escape(state.standing)))
        if state.phase:
            of = f"/{state.phase_total}" if state.phase_total else ""
            rows.append((state.phase, f"{_cells(state.phase_done, state.phase_total or 0)} {state.phase_done}{of}"))
        rows += headlines(state.metrics)
        if len(state.return_by_step) > 1:
            rows.append(("return by step", _curve(list(state.return_by_step))))
        if state.validation_returns:
            rows.append(("validation return", number(state.validation_returns[-1])))
        rows += [("failed", escape(line)) for line in state.tally.lines(2)]
        cell = '<td style="text-align:left">'
        table = "".join(f"<tr>{cell}{escape(name)}</td>{cell}{value}</td></tr>" for name, value in rows)
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        return f"<b>{escape(state.experiment)}</b> ({escape(state.backbone)})<table>{table}</table>{lines}"


def _cells(done: int, total: int) -> str:
    return f'<progress value="{min(done, total)}" max="{total}"></progress>' if total else "<progress></progress>"


def _curve(values: list[float], width: int = 240, height: int = 40) -> str:
    low, span = min(values), (max(values) - min(values)) or 1.0
    points = " ".join(
        f"{index * width / (len(values) - 1):.1f},{height - 2 - (value - low) / span * (height - 4):.1f}"
        for index, value in enumerate(values)
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" role="img">{line}</svg>'
