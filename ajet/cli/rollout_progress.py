"""What `ajet rollout` shows while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.agents import Trajectory

LINE_EVERY_S = 10.0


@dataclass(slots=True)
class Counts:
    """How far a batch is."""

    total: int
    done: int = 0
    failed: int = 0
    judged: int = 0
    succeeded: int = 0
    tokens: int = 0
    cost: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, trajectory: Trajectory) -> None:
        self.done += 1
        self.failed += trajectory.failure is not None
        self.judged += trajectory.is_success is not None
        self.succeeded += bool(trajectory.is_success)
        self.tokens += trajectory.usage.output_tokens
        self.cost += trajectory.cost or 0.0

    def text(self) -> str:
        parts = [f"{self.tokens:,} tokens"]
        if self.judged:
            parts.insert(0, f"{self.succeeded / self.judged:.0%} succeeded")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.cost:
            parts.append(f"cost {self.cost:.4f}")
        return ", ".join(parts)


@contextmanager
def progress(counts: Counts, *, quiet: bool = False) -> Iterator[Callable[[Trajectory], None]]:
    """Yields what is to be told of each trajectory that ended. Progress that can't be written ends nothing."""
    if quiet or sys.stderr is None:
        yield counts.add
    elif sys.stderr.isatty():
        with _bar(counts) as ended:
            yield ended
    else:
        shown = time.monotonic()

        def ended_plainly(trajectory: Trajectory) -> None:
            nonlocal shown
            counts.add(trajectory)
            if time.monotonic() - shown >= LINE_EVERY_S or counts.done == counts.total:
                shown = time.monotonic()
                with suppress(OSError):  # nobody reads it any more: the trajectories are what counts
                    print(f"{counts.done:,}/{counts.total:,}: {counts.text()}", file=sys.stderr, flush=True)

        yield ended_plainly


@contextmanager
def _bar(counts: Counts) -> Iterator[Callable[[Trajectory], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=counts.total)

        def ended(trajectory: Trajectory) -> None:
            counts.add(trajectory)
            bar.update(task, completed=counts.done, description=counts.text())

        yield ended
