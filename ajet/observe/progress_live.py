"""`LiveDisplay`: progress on a terminal, as a table with a line per step, and below it a panel that redraws itself."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

import psutil
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import ControlType, Segment
from rich.spinner import Spinner
from rich.text import Text

from ajet.observe.progress_state import ROUNDING, Display, ProgressState, duration, number, total_text
from ajet.schema.printable import printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_SECOND = 4
_GIB = 1024**3
_LABEL_WIDTH = 11
_BAR_WIDTH = 24
_SPARK_WIDTH = 40
_FIGURES_WIDTH = 20
"""Room that bars leave for the figures beside them."""
_PHASES_SHOWN = 5

STEP_WIDTH = 9
CELL_WIDTH = 8
GAP = "  "
HEADER_EVERY = 20
"""Rows between two headers: one is always on the screen."""


def ratio(value: float) -> str:
    """Three decimals, so that the column's points stand below each other."""
    if abs(value) < ROUNDING:
        value = 0.0
    return f"{value:.3f}" if abs(value) < 1000 and (abs(value) >= 0.001 or not value) else f"{value:.1e}"


def count(value: float) -> str:
    """A whole number, in thousands or millions if it is too long."""
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if abs(value) < 1e8 else f"{value / 1e6:,.0f}M"


def share(value: float) -> str:
    """Format a share of 1, without the space that would split the column."""
    return f"{value:.0%}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table."""

    label: str
    metric: str
    rank: int
    """Those of low rank are shown first, if there is no room for all."""
    shown: Callable[[float], str] = ratio
    late: bool = False
    """Only some steps have it, so the first one doesn't decide whether it is shown."""


COLUMNS = (
    Column("return", "return/mean", 0),
    Column("success", "success/rate", 1),
    Column("valid.", "val/return/mean", 2, late=True),
    Column("v. failed", "val/failed_share", 15, share, late=True),
    Column("turns", "episode/turns", 8),
    Column("reply", "episode/reply_length", 9, count),
    Column("loss", "train/loss", 3),
    Column("kl", "train/kl", 6),
    Column("entropy", "train/entropy", 7),
    Column("grad", "train/grad_norm", 10),
    Column("clip", "train/clip_fraction", 13),
    Column("lr", "train/lr", 14),
    Column("failed", "episode/failed_share", 4, share),
    Column("tok/s", "perf/tokens_per_second", 11, count),
    Column("rollout s", "time/rollout", 12, seconds),
    Column("train s", "time/train", 12, seconds),
    Column("time s", "time/step", 5, seconds),
)
"""From left to right."""


class StepTable:
    """Gives the lines of the table, one step at a time. Its columns are those of the first step that find room."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._width = 0
        self._rows = 0
        self._known: set[str] = set()

    def lines(self, step: str, metrics: Mapping[str, float], width: int, unit: str = "step") -> tuple[str, str]:
        """The header, or '' if it is still on the screen, and the row of a step."""
        header = ""
        fresh = {column.metric for column in COLUMNS if column.metric in metrics and not column.late} - self._known
        if width != self._width or fresh or self._rows >= HEADER_EVERY:
            self._known |= fresh
            self._columns, self._width, self._rows = _fitting(self._known, width), width, 0
            header = self._line(unit, [column.label for column in self._columns])
        self._rows += 1
        cells = [column.shown(metrics[column.metric]) if column.metric in metrics else "" for column in self._columns]
        return header, self._line(step, cells)

    def _line(self, step: str, cells: list[str]) -> str:
        widths = [max(CELL_WIDTH, len(column.label)) for column in self._columns]
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return GAP.join([f"{step:>{STEP_WIDTH}}", *padded]).rstrip()


def _fitting(known: set[str], width: int) -> list[Column]:
    """The columns to show: by rank as many as fit, in their order from left to right."""
    room = width - STEP_WIDTH
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        needed = len(GAP) + max(CELL_WIDTH, len(column.label))
        if (column.metric in known or column.late) and needed <= room:
            chosen.append(column)
            room -= needed
    return [column for column in COLUMNS if column in chosen]


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """The last `width` values as a row of block characters, without those that are no number."""
    values = [value for value in values[-width:] if math.isfinite(value)]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(int((value - low) / span * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)


def machine_load() -> str:
    """How busy this machine is: memory of this process, load, and the GPU if torch is loaded and uses one."""
    memory = psutil.Process().memory_info().rss
    parts = [f"{memory / _GIB:.1f} GiB", f"load {psutil.getloadavg()[0]:.1f}/{psutil.cpu_count()}"]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        parts.append(f"GPU {(total - free) / _GIB:.1f}/{total / _GIB:.0f} GiB")
    return "  ".join(parts)


class LiveDisplay(Display):
    """The dashboard."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._state = ProgressState()
        self._table = StepTable()
        self._spinner = Spinner("dots")
        self._closed = False
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._live._live_render = _ResizedRender(self._console, self._render())

    def started(self, state: ProgressState) -> None:
        self._state = state
        self._live.start()

    def phase(self, state: ProgressState) -> None:
        self._state = state

    def validation(self, step: int, state: ProgressState) -> None:
        """Print a row for a step that this run doesn't report; else it is part of its step's row."""
        if step == state.step:
            self._row(str(step), state)

    def step(self, state: ProgressState) -> None:
        self._row(f"{state.step}/{state.total_steps}" if state.total_steps else str(state.step), state)

    def message(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def close(self) -> None:
        self._closed = True
        if self._live.is_started:
            self._live.stop()

    def _row(self, step: str, state: ProgressState) -> None:
        header, row = self._table.lines(step, state.metrics, self._console.width, state.unit)
        if header:
            self._console.print(Text(header, style="bold", no_wrap=True))
        self._console.print(Text(row, no_wrap=True))

    # ------------------------------------------------------------ the panel

    def _render(self) -> RenderableType:
        """Each line is as long as its text, so that a narrower terminal has little to wrap."""
        state = self._state
        name = Text.assemble((state.experiment, "bold"), (f" · {state.backbone}", "dim"))
        rows = [(f"{state.unit}s", self._steps(state))]
        if not self._closed:  # what stays on the screen shows nothing that is going on
            rows.append((state.phase or "phase", self._phase(state)))
        returns = list(state.return_by_step)
        for label, values, style in (
            ("return", returns, "cyan"),
            ("reward", [] if returns else list(state.recent_rewards), "cyan"),
            ("validation", state.validation_returns, "green"),
            ("loss", list(state.loss_by_step), "magenta"),
        ):
            if values:
                bars = sparkline(values, self._room(_SPARK_WIDTH))
                rows.append((label, Text.assemble((bars, style), "  ", (number(values[-1]), "bold"))))
        rows.append(("best", Text(state.standing)))
        rows.append(("in all", Text(total_text(state.spent.figures()) if state.spent.steps else "")))
        rows += [("time", Text(_shares(state))), ("episodes", self._episodes(state))]
        rows += [("failed" if index == 0 else "", Text(line, "red")) for index, line in enumerate(state.tally.lines(2))]
        if not self._closed:
            rows.append(("machine", Text(machine_load())))
        if state.viewer:
            rows.append(("viewer", Text(state.viewer)))
        lines = [Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), text) for label, text in rows if text.plain]
        return Group(*(_one_line(line) for line in [Text(""), name, *lines]))

    def _steps(self, state: ProgressState) -> Text:
        eta = state.eta_seconds
        spent = duration(time.monotonic() - state.began)
        text = f"{state.step}/{state.total_steps or '?'}  "
        done = state.step / state.total_steps if state.total_steps else 0.0
        return Text.assemble(self._bar(done), text, (spent + (f", eta {duration(eta)}" if eta else ""), "dim"))

    def _phase(self, state: ProgressState) -> Text:
        spent = (duration(time.monotonic() - state.phase_began), "dim")
        detail = f"{state.phase_detail}  " if state.phase_detail else ""
        if not state.phase_total:
            spinner = self._spinner.render(time.monotonic())
            turning = spinner if isinstance(spinner, Text) else Text("…")
            return Text.assemble(turning, " ", detail, spent)
        done = f"{state.phase_done}/{state.phase_total}  "
        return Text.assemble(self._bar(state.phase_done / state.phase_total), done, detail, spent)

    def _episodes(self, state: ProgressState) -> Text:
        spent = max(time.monotonic() - state.began, 1e-9)
        return Text.assemble(f"{state.episodes:,}  ", (f"{state.sampled_tokens / spent:,.0f} sampled tok/s", "dim"))

    def _bar(self, done: float) -> Text:
        """The rest is thin, so that it is told apart without colours, too."""
        width = self._room(_BAR_WIDTH)
        filled = round(min(max(done, 0.0), 1.0) * width)
        return Text.assemble(("━" * filled, "cyan"), ("─" * (width - filled), "bright_black"), "  ")

    def _room(self, most: int) -> int:
        """The width of a bar on this terminal."""
        return max(1, min(most, self._console.width - _LABEL_WIDTH - _FIGURES_WIDTH))


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _shares(state: ProgressState) -> str:
    """Where the time went: `rollout 71 %  train 20 %  validate 9 %`."""
    spent = state.time_by_phase
    total = sum(spent.values())
    if total <= 0:
        return ""
    most = sorted(spent, key=lambda name: -spent[name])[:_PHASES_SHOWN]
    return "  ".join(f"{name} {spent[name] / total:.0%}".replace("%", " %") for name in most)


class _ResizedRender(LiveRender):
    """Erases all of what it drew even if the terminal has become narrower since, and wrapped it into more lines."""

    def __init__(self, console: Console, renderable: RenderableType) -> None:
        super().__init__(renderable)
        self._terminal = console
        self._lengths: list[int] = []
        """The lengths of the lines drawn last."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._lengths = [0]
        for segment in super().__rich_console__(console, options):
            if isinstance(segment, Segment) and segment.text == "\n":
                self._lengths.append(0)
            elif isinstance(segment, Segment):
                self._lengths[-1] += segment.cell_length
            yield segment

    def position_cursor(self) -> Control:
        if not self._lengths:
            return Control()
        up = self.rows(self._terminal.width) - 1
        erase = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *(erase * up))

    def rows(self, width: int) -> int:
        """The rows that the lines take on a terminal of this width."""
        return sum(max(1, math.ceil(length / width)) for length in self._lengths)
