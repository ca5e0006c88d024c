"""Progress on a terminal: a live panel redrawn in place, below the lines that scroll by."""

from __future__ import annotations

import sys
import time
from typing import IO

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ajet.observe.progress import HEADLINES, ProgressState, duration, number
from ajet.schema.episode import Episode

_BLOCKS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_SECOND = 4
_GIB = 1024**3
_STYLES = {"warning": "yellow", "error": "bold red"}


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as a row of block characters."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0] for value in values)


def machine_load() -> str:
    """How busy this machine is: memory of this process, load, and the GPU if torch is loaded and uses one."""
    memory = psutil.Process().memory_info().rss
    parts = [f"{memory / _GIB:.1f} GiB", f"load {psutil.getloadavg()[0]:.1f}/{psutil.cpu_count()}"]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        parts.append(f"GPU {(total - free) / _GIB:.1f}/{total / _GIB:.0f} GiB")
    return "  ".join(parts)


class LiveDisplay:
    """The dashboard."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream)
        self._state = ProgressState()
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def started(self, state: ProgressState) -> None:
        self._state = state
        self._live.start()

    def phase(self, state: ProgressState) -> None:
        self._state = state

    def episode(self, state: ProgressState, episode: Episode) -> None:
        pass

    def step(self, state: ProgressState) -> None:
        shown = [f"{label} [b]{number(state.metrics[name])}[/b]" for label, name in HEADLINES if name in state.metrics]
        self._console.print(f"[dim]step[/dim] [b]{state.step}[/b]  " + "  ".join(shown), highlight=False)

    def message(self, text: str, level: str) -> None:
        self._console.print(Text(text, style=_STYLES.get(level, "")))

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def _render(self) -> RenderableType:
        state = self._state
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(ratio=1)
        rows.add_row("steps", self._steps(state))
        rows.add_row(state.phase or "phase", self._phase(state))
        rewards = list(state.reward_by_step) or list(state.recent_rewards)
        if rewards:
            rows.add_row("reward", f"[cyan]{sparkline(rewards)}[/cyan]  [b]{number(rewards[-1])}[/b]")
        rows.add_row("episodes", self._episodes(state))
        rows.add_row("machine", escape(machine_load()))
        title = f"[b]{escape(state.experiment)}[/b] [dim]· {escape(state.backbone)}[/dim]"
        return Panel(Group(rows), title=title, title_align="left", border_style="bright_black", padding=(0, 1))

    def _steps(self, state: ProgressState) -> RenderableType:
        eta = state.eta_seconds
        spent = duration(time.monotonic() - state.began)
        text = f"{state.step}/{state.total_steps or '?'}  [dim]{spent}" + (f", eta {duration(eta)}" if eta else "")
        return self._bar(state.step, state.total_steps, text + "[/dim]")

    def _phase(self, state: ProgressState) -> RenderableType:
        total = f"/{state.phase_total}" if state.phase_total else ""
        spent = duration(time.monotonic() - state.phase_began)
        return self._bar(state.phase_done, state.phase_total, f"{state.phase_done}{total}  [dim]{spent}[/dim]")

    def _bar(self, done: int, total: int | None, text: str) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        row.add_column(width=30)
        row.add_column()
        row.add_row(ProgressBar(total=total, completed=done, width=30, pulse=total is None), text)
        return row

    def _episodes(self, state: ProgressState) -> str:
        spent = max(time.monotonic() - state.began, 1e-9)
        text = f"{state.episodes:,}  [dim]{state.sampled_tokens / spent:,.0f} sampled tok/s[/dim]"
        failures = "  ".join(f"{kind} {count}" for kind, count in sorted(state.failures.items()))
        return f"{text}  [red]{failures}[/red]" if failures else text
