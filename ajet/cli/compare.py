"""`ajet compare RUN RUN …`: the results of runs side by side, and the config keys in which they differ."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.observe.viewer import Experiment

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


def run(argv: Sequence[str]) -> int:
    """Print two tables."""
    parser = CommandParser("ajet compare", description="The results of runs, and the config keys in which they differ.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="an experiment's folder, or its name")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error("ajet compare RUN RUN: at least two runs")

    from ajet.cli.view import opened_experiment
    from ajet.observe.viewer import differences, differently_judged

    experiments = [opened_experiment(given) for given in arguments.runs]
    _show("results", experiments, [(label, _values(experiments, name, at)) for label, name, at in RESULTS])
    print()
    different = list(differences(experiments).items())
    if different:
        _show("config", experiments, different)
    else:
        print("their configs are the same")
    if why := differently_judged(experiments):
        print(f"\n{why}", file=sys.stderr)
    return 0


def _values(experiments: Sequence[Experiment], metric: str, index: int) -> list[str]:
    from ajet.cli.runs import number

    found = []
    for experiment in experiments:
        values = [value for value in experiment.metrics()["series"].get(metric, []) if value is not None]
        found.append(number(values[index] if values else None))
    return found


def _show(title: str, experiments: Sequence[Experiment], rows: Sequence[tuple[str, list[str]]]) -> None:
    from ajet.cli.runs import print_table

    here = f"{Path.cwd()}{os.sep}"
    table = [
        [label.removeprefix("ajet."), *(value.replace(here, "") for value in values)]
        for label, values in rows
        if set(values) != {"–"}
    ]
    print_table([title, *(experiment.name for experiment in experiments)], table)
