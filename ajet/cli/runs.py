"""`ajet runs`, `ajet report` and `ajet view`: what runs came to, as a table, one HTML file, or in the browser."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ajet.schema.errors import UserError
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser

WIDTH = 100
"""Longer lines of prose are hard to read."""
GAP = "  "
LEAST = 8
"""Columns are cut no shorter than this."""
LONG_NAME = 24
"""No column is left out to make room for a longer one in the first."""
COLOURS = {"running": "36", "completed": "32", "failed": "31", "killed": "31", "interrupted": "33"}
"""The colours of status cells."""


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    spare: Sequence[str] = (),
    ends: bool = False,
) -> None:
    """Print rows below a head. On a narrow terminal, what is `spare` is left out, then texts are cut, but not the
    numbers (`right`). If there is still no room, each row is a block of lines. `ends`: of the first column, the end
    is kept."""
    table = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = {index: max(len(row[index]) for row in table) for index in range(len(head))}
    terminal = sys.stdout.isatty()
    room = shutil.get_terminal_size().columns if terminal else sys.maxsize

    def excess(longest_name: int = sys.maxsize) -> int:
        return sum(widths.values()) - max(widths[0] - longest_name, 0) + len(GAP) * (len(widths) - 1) - room

    for name in spare:
        if excess(LONG_NAME) > 0:
            del widths[list(head).index(name)]
    texts = {index: max(LEAST, len(table[0][index])) for index in widths if index not in right}
    while excess() > 0:  # the widest column of texts is cut by one until all fit
        widest = max(texts, key=lambda index: (widths[index] > texts[index], widths[index]))
        if widths[widest] <= texts[widest]:
            return _print_blocks(table)
        widths[widest] -= 1
    colour = terminal and not os.environ.get("NO_COLOR")
    for number, row in enumerate(table):
        cells = []
        for index, width in widths.items():
            cut = row[index]
            if len(cut) > width:
                cut = f"…{cut[1 - width :]}" if ends and index == 0 else f"{cut[: width - 1]}…"
            padded = f"{cut:>{width}}" if index in right else f"{cut:<{width}}"
            code = "1" if number == 0 else COLOURS.get(row[index])
            cells.append(f"\033[{code}m{padded}\033[0m" if colour and code else padded)
        print(GAP.join(cells).rstrip())


def wrapped(text: str, indent: int) -> list[str]:
    """The text in lines that fit the terminal, and at most `WIDTH`. All but the first are indented by two more."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    first, further = " " * indent, " " * (indent + 2)
    line = " ".join(text.split())
    return textwrap.wrap(
        line, width, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def _print_blocks(table: Sequence[Sequence[str]]) -> None:
    """A line for each cell, and an empty one between rows."""
    head, *rows = table
    room = max(map(len, head))
    blocks = (
        "\n".join(f"{name:<{room}}{GAP}{cell}" for name, cell in zip(head, row, strict=True) if cell) for row in rows
    )
    print("\n\n".join(blocks))


def run(argv: Sequence[str]) -> int:
    """`ajet runs [FOLDER]`: the runs in a folder, the latest first: how far they are and how well they do."""
    parser = CommandParser("ajet runs", description="List runs, the latest first.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of experiments (default: saved_experiments)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args(argv)

    from ajet.cli.targets import find_experiment
    from ajet.observe.viewer import Library, NoExperimentsError

    root = find_experiment(arguments.folder)
    if arguments.folder and not root.is_dir():
        raise NoExperimentsError(f"{root}: no such folder\n    name a folder of runs, or none for saved_experiments")
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
    from ajet.observe.progress_state import cost_texts

    costs = [", ".join(cost_texts(one["total"])) for one in summaries]
    rows = [
        [
            one["name"],
            one["status"],
            str(one["step"]),
            number(one["return"]),
            number(one["validation"]),
            f"{one['episodes']:,}",
            _time(one),
            *([cost or "–"] if any(costs) else []),
            ago(time.time() - one["touched"]) if one["touched"] else "–",
            one["backbone"],
            _short(one["model"]),
        ]
        for one, cost in zip(summaries, costs, strict=True)
    ]
    paid = ["cost"] if any(costs) else []
    head = ["run", "status", "step", "return", "valid.", "episodes", "time", *paid, "written", "backbone", "model"]
    print_table(head, rows, right=(2, 3, 4, 5), spare=("model", "backbone", "episodes", *paid, "written", "time"))


def _time(one: dict[str, Any]) -> str:
    """How long its steps and validations took, and of a run that goes on, what is expected in all."""
    from ajet.observe.progress_state import time_text

    shown = ("seconds", "expected_seconds") if one["status"] == "running" else ("seconds",)
    total = {name: one["total"][name] for name in shown if name in one["total"]}
    return time_text(total) if total.get("seconds") else "–"


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


def report(argv: Sequence[str]) -> int:
    """`ajet report EXPERIMENT`: one HTML file (and PNG plots) about a run, to send to a colleague."""
    parser = CommandParser("ajet report", description="One self-contained HTML file about a run, and its plots.")
    parser.add_argument("experiment", type=Path, help="an experiment's folder, or its name in saved_experiments")
    parser.add_argument("-o", "--output", type=Path, help="the HTML file (default: report.html in the experiment)")
    arguments = parser.parse_args(argv)

    from ajet.cli.targets import opened_experiment
    from ajet.observe.viewer import write_report

    experiment = opened_experiment(arguments.experiment)
    written = write_report(experiment, arguments.output or experiment.path / "report.html")
    print(f"{written[0]}\n{len(written) - 1} plots in {written[0].with_name(written[0].stem + '_plots')}")
    return 0


def view(argv: Sequence[str]) -> int:
    """`ajet view [EXPERIMENT]`: runs and episodes in the browser, while they run and after, until Ctrl-C."""
    parser = CommandParser("ajet view", description="Show runs and episodes in the browser.")
    parser.add_argument(
        "experiment",
        nargs="?",
        type=Path,
        help="a folder of experiments (default: saved_experiments), one of them, its name, or a folder of trajectories",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, help="port (default: 8642, or a free one)")
    parser.add_argument(
        "--password",
        default=os.environ.get("AJET_VIEW_PASSWORD"),
        help="required if --host is reachable by others",
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    arguments = parser.parse_args(argv)

    from ajet.cli.targets import find_experiment
    from ajet.observe.viewer import Viewer

    given = find_experiment(arguments.experiment)
    if given.is_file():
        raise UserError(f"{given} is a file: give the folder of a run, of several, or of trajectories")
    with shown_folder(given) as root:
        trajectories = None if root == given else given
        asked = {"host": arguments.host, "port": arguments.port, "password": arguments.password}
        viewer = Viewer(root, trajectories=trajectories, **asked)
        print(f"{viewer.url}\n(Ctrl-C to stop)", flush=True)
        if not arguments.no_browser and os.environ.get("DISPLAY"):
            import webbrowser

            threading.Timer(0.5, webbrowser.open, [viewer.url]).start()
        viewer.serve()
    return 0


@contextmanager
def shown_folder(folder: Path) -> Iterator[Path]:
    """The folder itself; or, if it holds trajectories of agents that ran alone, a folder with their episodes, which is
    kept up to date."""
    from ajet.schema.trajectory import trajectory_files

    if next(trajectory_files(folder), None) is None:
        yield folder
        return
    from ajet.observe.viewer import TrajectoryFolder

    with TemporaryDirectory(prefix="ajet-view-") as place:
        experiment = Path(place) / folder.resolve().name
        experiment.mkdir()
        trajectories = TrajectoryFolder(folder, experiment)
        try:
            trajectories.sync()
            trajectories.watch()
            yield experiment
        finally:
            trajectories.close()
