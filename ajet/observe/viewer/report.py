"""`ajet report`: one self-contained HTML file about a run, and its plots as PNG files.

The file contains no scripts and loads nothing, so it is safe to mail and readable anywhere.
"""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ajet.observe.episode_codec import conversation, message_text
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.run_files import read_regular
from ajet.observe.viewer.library import Experiment
from ajet.schema import __version__
from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command
from ajet.schema.printable import printable

_TEMPLATES = Path(__file__).parent / "templates"
_TEXT_CHARACTERS = 1500
_EXAMPLES = 2


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of the report."""

    name: str
    title: str
    metrics: tuple[str, ...]
    unit: str = ""


PLOTS = (
    Plot("return", "Return", ("return/mean", "val/return/mean")),
    Plot("success", "Success", ("success/rate", "val/success/rate")),
    Plot("failed", "Failed episodes", ("episode/failed_share", "val/failed_share")),
    Plot("pass_at_k", "pass@k", ("success/pass@2", "success/pass@4", "success/pass@8", "success/pass@16")),
    Plot("loss", "Loss", ("train/loss",)),
    Plot("kl", "KL to the starting model", ("train/kl",)),
    Plot("entropy", "Entropy", ("train/entropy",)),
    Plot("clip_fraction", "Clip fraction", ("train/clip_fraction",)),
    Plot("turns", "Turns per episode", ("episode/turns",)),
    Plot("length", "Reply length", ("episode/reply_length",), "tokens"),
    Plot("speed", "Tokens per second", ("perf/tokens_per_second",)),
    Plot("time", "Time per step", ("time/rollout", "time/train", "time/sync"), "seconds"),
    Plot("packing", "Packing ratio", ("train/packing_ratio",)),
)
_HEADLINES = (
    ("Return", "return/mean"),
    ("Failed", "episode/failed_share"),
    ("Success", "success/rate"),
    ("KL", "train/kl"),
    ("Entropy", "train/entropy"),
    ("Seconds per step", "time/step"),
    ("Tokens per second", "perf/tokens_per_second"),
)
_COLOURS = ("#4453d6", "#d0692c", "#16846a", "#b13a8b")


def write_report(experiment: Experiment, target: Path) -> list[Path]:
    """Write the HTML file and, next to it in `<name>_plots/`, its plots. Returns all files written."""
    columns = experiment.metrics()
    pictures = {plot: _draw(plot, columns) for plot in PLOTS if _series(plot, columns)}
    store = experiment.store()
    config = experiment.path / "config.resolved.yaml"
    html = _rendered(
        "report.html",
        name=experiment.name,
        summary=experiment.summary(),
        headlines=_headlines(columns),
        plots=[(plot.title, base64.b64encode(picture).decode()) for plot, picture in pictures.items()],
        facets=store.facets() if store else None,
        examples=_examples(store) if store else [],
        config=read_regular(config) if config.exists() else "",
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    folder = target.with_name(f"{target.stem}_plots")
    folder.mkdir(exist_ok=True)
    written = [target]
    for plot, picture in pictures.items():
        written.append(folder / f"{plot.name}.png")
        written[-1].write_bytes(picture)
    return written


def write_tables(target: Path, title: str, sections: Iterable[tuple[str, list[str], list[list[str]]]]) -> None:
    """Write tables, each with its name, head and rows, as one HTML file."""
    html = _rendered("tables.html", title=title, sections=list(sections))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")


def _rendered(template: str, **values: Any) -> str:
    pages = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, finalize=_shown)
    return pages.get_template(template).render(made=time.strftime("%Y-%m-%d %H:%M"), version=__version__, **values)


def _shown(value: Any) -> Any:
    """The text as shown on the page: characters that reorder or hide text are escaped."""
    return printable(value) if type(value) is str else value


def _series(plot: Plot, columns: dict[str, Any]) -> dict[str, list[float | None]]:
    """The metrics of a plot that this run recorded."""
    found = {name: columns["series"][name] for name in plot.metrics if name in columns["series"]}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _label(name: str, series: Iterable[str]) -> str:
    """A line's name in its plot's legend: training or validation, otherwise the end of the metric's name."""
    if any(other.startswith("val/") for other in series):
        return "validation" if name.startswith("val/") else "training"
    return name.rsplit("/", 1)[-1]


def _draw(plot: Plot, columns: dict[str, Any]) -> bytes:
    try:
        figure_type = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MissingDependencyError(f"`ajet report` needs matplotlib: {install_command('plot')}") from error
    figure = figure_type(figsize=(5.6, 2.9), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    series = _series(plot, columns)
    for index, (name, values) in enumerate(series.items()):
        points = [(step, value) for step, value in zip(columns["steps"], values, strict=True) if value is not None]
        steps, heights = zip(*points, strict=True)
        colour = _COLOURS[index % len(_COLOURS)]
        marker = "o" if len(points) < 3 else None
        axes.plot(steps, heights, color=colour, linewidth=1.6, marker=marker, label=_label(name, series))
    axes.set_title(plot.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(plot.unit, fontsize=8)
    axes.tick_params(labelsize=8, length=0)
    axes.grid(color="#e4e7ec", linewidth=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(series) > 1:
        axes.legend(fontsize=7, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _headlines(columns: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Label, last value, first value."""
    rows = []
    for label, name in _HEADLINES:
        values = [value for value in columns["series"].get(name, []) if value is not None and math.isfinite(value)]
        if values:
            rows.append((label, f"{values[-1]:.4g}", f"{values[0]:.4g}"))
    return rows


def _examples(store: EpisodeStore) -> list[dict[str, Any]]:
    """The best and the worst episode of the last step, and the newest failures."""
    last = store.facets().last_step
    step = EpisodeFilter(step_min=last, reward_min=-1e12)
    chosen = {}
    for label, descending in (("Worst", False), ("Best", True)):
        rows, _ = store.page(step, sort="reward", descending=descending, limit=1)
        chosen.update({row["episode_id"]: label for row in rows})
    for kind in list(store.facets().failures)[:_EXAMPLES]:
        rows, _ = store.page(EpisodeFilter(failure=kind), limit=1)
        chosen.update({row["episode_id"]: f"Failed: {kind}" for row in rows})
    return [_example(store, episode_id, label) for episode_id, label in chosen.items()]


def _example(store: EpisodeStore, episode_id: str, label: str) -> dict[str, Any]:
    recorded = store.get(episode_id)
    episode = recorded.episode
    messages = conversation(episode.tree, len(episode.tree.calls) - 1) if episode.tree.calls else []
    return {
        "label": label,
        "id": episode_id,
        "task": episode.task_id,
        "step": recorded.step,
        "reward": episode.reward,
        "failure": episode.failure,
        "messages": [(message.get("role", ""), message_text(message)[:_TEXT_CHARACTERS]) for message in messages],
    }
