"""Progress in a notebook: one HTML block below the cell, redrawn in place."""

from __future__ import annotations

import sys
import time
from collections import deque
from html import escape
from typing import Any

from ajet.observe.progress import ProgressState, duration, headlines, number
from ajet.schema.episode import Episode

REDRAW_EVERY_S = 0.5
"""A redraw is a message to the browser."""
LINES = 8
"""How many of the latest messages are shown."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookDisplay:
    """The HTML block."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines: deque[str] = deque(maxlen=LINES)
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

    def validation(self, state: ProgressState) -> None:
        self._draw(state, now=True)

    def message(self, text: str, level: str) -> None:
        self._lines.append(text if level == "info" else f"{level}: {text}")

    def close(self) -> None:
        if self._handle is not None:
            self._draw(self._state, now=True)

    def _draw(self, state: ProgressState, *, now: bool = False) -> None:
        self._state = state
        if self._handle is None or not (now or time.monotonic() - self._drawn > REDRAW_EVERY_S):
            return
        from IPython.display import HTML

        self._drawn = time.monotonic()
        self._handle.update(HTML(self._html(state)))  # type: ignore[no-untyped-call]

    def _html(self, state: ProgressState) -> str:
        total = state.total_steps or 0
        eta = state.eta_seconds
        left = f", {duration(eta)} left" if eta else ""
        rows = [(f"{state.unit}s", f"{_bar(state.step, total)} {state.step}/{total or '?'}{left}")]
        if state.standing:
            rows.append(("best", escape(state.standing)))
        if state.phase:
            of = f"/{state.phase_total}" if state.phase_total else ""
            rows.append((state.phase, f"{_bar(state.phase_done, state.phase_total or 0)} {state.phase_done}{of}"))
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


def _bar(done: int, total: int) -> str:
    return f'<progress value="{min(done, total)}" max="{total}"></progress>' if total else "<progress></progress>"


def _curve(values: list[float], width: int = 240, height: int = 40) -> str:
    low, span = min(values), (max(values) - min(values)) or 1.0
    points = " ".join(
        f"{index * width / (len(values) - 1):.1f},{height - 2 - (value - low) / span * (height - 4):.1f}"
        for index, value in enumerate(values)
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="{width}" height="{height}" role="img">{line}</svg>'
