"""`ajet runs [FOLDER]`: the runs in a folder, the latest first: how far they are and how well they do."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.schema.printable import printable


def run(argv: Sequence[str]) -> int:
    """Print a table."""
    parser = ArgumentParser("ajet runs", description="List runs, the latest first.")
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of experiments (default: saved_experiments)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args(argv)

    from ajet.cli.view import find_experiment
    from ajet.viewer.library import Library, NoExperimentsError

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
    from ajet.cli.table import print_table

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
    from ajet.observe.progress_table import ratio

    return "–" if value is None else ratio(value)


def ago(seconds: float) -> str:
    """`5 min ago`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
