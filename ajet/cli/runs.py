"""`ajet runs`, `ajet compare` and `ajet report`: what runs came to, as a table, side by side, or as one HTML file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.observe.viewer import Experiment

GAP = "  "
LEAST = 8
"""Columns are cut no shorter than this."""
COLOURS = {"running": "36", "completed": "32", "failed": "31", "killed": "31", "interrupted": "33"}
"""The colours of status cells."""


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), spare: Sequence[str] = ()
) -> None:
    """Print rows below a head. `right`: columns of numbers; `spare`: what is left out first on a narrow terminal."""
    head, rows = [printable(name) for name in head], [[printable(cell) for cell in row] for row in rows]
    terminal = sys.stdout.isatty()
    room = shutil.get_terminal_size().columns
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    shown = list(range(len(head)))
    for name in spare if terminal else ():
        if sum(widths[index] for index in shown) + len(GAP) * (len(shown) - 1) > room:
            shown.remove(head.index(name))
    head, widths = [head[index] for index in shown], [widths[index] for index in shown]
    rows = [[row[index] for index in shown] for row in rows]
    right = [position for position, index in enumerate(shown) if index in right]
    if terminal:
        widths = _fitting(widths, [len(name) for name in head], room)
    colour = terminal and not os.environ.get("NO_COLOR")
    for number, row in enumerate((head, *rows)):
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cut = cell if len(cell) <= width else f"{cell[: width - 1]}…"
            padded = f"{cut:>{width}}" if index in right else f"{cut:<{width}}"
            code = "1" if number == 0 else COLOURS.get(cell)
            cells.append(f"\033[{code}m{padded}\033[0m" if colour and code else padded)
        print(GAP.join(cells).rstrip())


def _fitting(widths: list[int], heads: list[int], room: int) -> list[int]:
    """Cut the widest column by one until all fit."""
    widths = list(widths)
    while sum(widths) + len(GAP) * (len(widths) - 1) > room:
        widest = max(range(len(widths)), key=lambda index: widths[index])
        if widths[widest] <= max(LEAST, heads[widest]):
            break
        widths[widest] -= 1
    return widths


def run(argv: Sequence[str]) -> int:
    """`ajet runs [FOLDER]`: the runs in a folder, the latest first: how far they are and how well they do."""
    parser = CommandParser("ajet runs", description="List runs, the latest first.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of experiments (default: saved_experiments)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args(argv)

    from ajet.cli.view import find_experiment
    from ajet.observe.viewer import Library, NoExperimentsError

    root = find_experiment(arguments.folder)
    library = Library(root)
    summaries = [library.get(name).summary() for name in library.names()]
    if not summaries:
        raise NoExperimentsError(f"no runs in {root}\n    start one: ajet --conf FILE.yaml, or name another folder")
    if arguments.json:
        for summary in summaries:
            print(json.dumps(summary))
    else:
        _show(summaries)
        for one in summaries:
            if one["problem"]:
                print(printable(f"{one['name']}: {one['problem']}"), file=sys.stderr)
    return 0


def _show(summaries: list[dict[str, Any]]) -> None:
    rows = [
        [
            one["name"],
            one["status"],
            str(one["step"]),
            number(one["return"]),
            number(one["validation"]),
            f"{one['episodes']:,}",
            ago(time.time() - one["touched"]),
            one["backbone"],
            _short(one["model"]),
        ]
        for one in summaries
    ]
    head = ["run", "status", "step", "return", "valid.", "episodes", "written", "backbone", "model"]
    print_table(head, rows, right=(2, 3, 4, 5), spare=("model", "backbone", "episodes"))


def _short(model: str) -> str:
    """The last two parts of a long path."""
    parts = Path(model).parts
    return str(Path(*parts[-2:])) if Path(model).is_absolute() and len(parts) > 2 else model


def number(value: float | None) -> str:
    """A result with three decimals."""
    from ajet.observe.progress_live import ratio

    return "–" if value is None else ratio(value)


def ago(seconds: float) -> str:
    """`5 min ago`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


RESULTS = (
    ("return, first step", "return/mean", 0),
    ("return, last step", "return/mean", -1),
    ("failed, last step", "episode/failed_share", -1),
    ("success, last step", "success/rate", -1),
    ("validation, first", "val/return/mean", 0),
    ("validation, last", "val/return/mean", -1),
    ("validation, failed", "val/failed_share", -1),
    ("loss, last step", "train/loss", -1),
)
"""Label, metric, and which of its values."""


def compare(argv: Sequence[str]) -> int:
    """`ajet compare RUN RUN …`: the results of runs side by side, and the config keys in which they differ."""
    parser = CommandParser("ajet compare", description="The results of runs, and the config keys in which they differ.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="an experiment's folder, or its name")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error("ajet compare RUN RUN: at least two runs")

    from ajet.cli.view import opened_experiment
    from ajet.observe.viewer import differences, differently_judged

    experiments = [opened_experiment(given) for given in arguments.runs]
    _show_beside("results", experiments, [(label, _values(experiments, name, at)) for label, name, at in RESULTS])
    print()
    different = list(differences(experiments).items())
    if different:
        _show_beside("config", experiments, different)
    else:
        print("their configs are the same")
    if why := differently_judged(experiments):
        print(f"\n{why}", file=sys.stderr)
    return 0


def _values(experiments: Sequence[Experiment], metric: str, index: int) -> list[str]:
    found = []
    for experiment in experiments:
        values = [value for value in experiment.metrics()["series"].get(metric, []) if value is not None]
        found.append(number(values[index] if values else None))
    return found


def _show_beside(title: str, experiments: Sequence[Experiment], rows: Sequence[tuple[str, list[str]]]) -> None:
    here = f"{Path.cwd()}{os.sep}"
    table = [
        [label.removeprefix("ajet."), *(value.replace(here, "") for value in values)]
        for label, values in rows
        if set(values) != {"–"}
    ]
    print_table([title, *(experiment.name for experiment in experiments)], table)


def report(argv: Sequence[str]) -> int:
    """`ajet report EXPERIMENT`: one HTML file (and PNG plots) about a run, to send to a colleague."""
    parser = CommandParser("ajet report", description="One self-contained HTML file about a run, and its plots.")
    parser.add_argument("experiment", type=Path, help="an experiment's folder, or its name in saved_experiments")
    parser.add_argument("-o", "--output", type=Path, help="the HTML file (default: report.html in the experiment)")
    arguments = parser.parse_args(argv)

    from ajet.cli.view import opened_experiment
    from ajet.observe.viewer import write_report

    experiment = opened_experiment(arguments.experiment)
    written = write_report(experiment, arguments.output or experiment.path / "report.html")
    print(f"{written[0]}\n{len(written) - 1} plots in {written[0].with_name(written[0].stem + '_plots')}")
    return 0
