"""Progress without a terminal: plain lines, JSON lines, or nothing but errors."""

from __future__ import annotations

import sys
import time
from typing import IO

from ajet.observe.progress import ProgressState, duration, json_line, number
from ajet.schema.episode import Episode

_LINE_EVERY_S = 10.0
"""Within a phase, plain output says how far it is at most that often: CI logs stay short."""

HEADLINES = (
    ("reward", "reward/mean"),
    ("success", "success/rate"),
    ("loss", "train/loss"),
    ("kl", "train/kl"),
    ("entropy", "train/entropy"),
    ("tok/s", "perf/tokens_per_second"),
    ("step s", "time/step"),
)
"""The metrics that a step's one line shows, under short names; the others are in `metrics.jsonl`."""


class PlainDisplay:
    """One line a phase, a failure, a step; within long phases one every ten seconds."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last_line = time.monotonic()

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text, file=self._stream, flush=True)

    def started(self, state: ProgressState) -> None:
        steps = f", {state.total_steps} steps" if state.total_steps else ""
        resumed = f", resumed after step {state.step}" if state.step else ""
        self._line(f"{state.experiment} ({state.backbone}{steps}{resumed})")

    def phase(self, state: ProgressState) -> None:
        self._last_line = time.monotonic()

    def advanced(self, state: ProgressState) -> None:
        if time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._line(f"  {state.phase} {_share(state)}")

    def episode(self, state: ProgressState, episode: Episode) -> None:
        if episode.failure is not None:
            self._line(f"  {episode.status}: episode {episode.episode_id}: {episode.failure.message.splitlines()[0]}")
        self.advanced(state)

    def step(self, state: ProgressState) -> None:
        shown = [f"{label} {number(state.metrics[name])}" for label, name in HEADLINES if name in state.metrics]
        total = f"/{state.total_steps}" if state.total_steps else ""
        eta = state.eta_seconds
        rest = [f"eta {duration(eta)}"] if eta else []
        self._line("  ".join([f"step {state.step}{total}", *shown, *rest]))

    def message(self, text: str, level: str) -> None:
        self._line(text if level == "info" else f"{level}: {text}")

    def close(self) -> None:
        pass


class JsonDisplay:
    """One JSON object a line."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def _write(self, **fields: object) -> None:
        self._stream.write(json_line(time=round(time.time(), 3), **fields))
        self._stream.flush()

    def started(self, state: ProgressState) -> None:
        self._write(
            event="started",
            experiment=state.experiment,
            backbone=state.backbone,
            total_steps=state.total_steps,
            step=state.step,
        )

    def phase(self, state: ProgressState) -> None:
        self._write(event="phase", phase=state.phase, total=state.phase_total, step=state.step)

    def advanced(self, state: ProgressState) -> None:
        pass

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

    def step(self, state: ProgressState) -> None:
        self._write(event="step", step=state.step, metrics=state.metrics)

    def message(self, text: str, level: str) -> None:
        self._write(event="message", level=level, text=text)

    def close(self) -> None:
        pass


class QuietDisplay(PlainDisplay):
    """Errors, on stderr; nothing else."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(sys.stderr)

    def started(self, state: ProgressState) -> None:
        pass

    def advanced(self, state: ProgressState) -> None:
        pass

    def episode(self, state: ProgressState, episode: Episode) -> None:
        pass

    def step(self, state: ProgressState) -> None:
        pass

    def message(self, text: str, level: str) -> None:
        if level == "error":
            super().message(text, level)


def _share(state: ProgressState) -> str:
    return f"{state.phase_done}/{state.phase_total}" if state.phase_total else str(state.phase_done)
