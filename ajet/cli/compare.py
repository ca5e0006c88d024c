"""`ajet compare RUN …`: results side by side, the config keys that differ, and the difference task by task.

With one run, its last validation is compared with its first. Folders that `ajet eval --out` wrote are runs, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.cli.runs import number, print_table
from ajet.schema.errors import UserError
from ajet.schema.files import json_line
from ajet.schema.printable import one_line, printable
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.observe.viewer import Experiment, RunGain

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


SIDE_BY_SIDE = 2
"""More runs are a sweep: a table with a row for each, the best first."""
QUERY_LENGTH = 80


def run(argv: Sequence[str]) -> int:
    """Print the tables."""
    parser = CommandParser("ajet compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="an experiment's folder, or its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)

    from ajet.cli.targets import opened_experiment
    from ajet.observe.viewer import differences, differently_judged, run_gains

    experiments = [opened_experiment(_cell(given)) for given in arguments.runs]
    gains = run_gains(experiments)
    if len(experiments) == 1 and not gains:
        if experiments[0].prompts.exists:
            raise UserError(
                f"{experiments[0].name} searched for prompts, with several candidates in each round: its "
                "prompts/best.yaml compares the best with the first"
            )
        raise UserError(
            f"{experiments[0].name} has fewer than two recorded validations to compare\n    "
            "name another run beside it; or train with trainer_common.val_before_train: true, and not with "
            "recorder.keep: failures"
        )
    different = differences(experiments)
    why = differently_judged(experiments)
    if arguments.json:
        print(json_line(_as_json(experiments, different, gains, why), ascii_only=True), end="")
        return 0
    if len(experiments) > SIDE_BY_SIDE:
        _show_sweep(experiments, different, gains)
    elif len(experiments) == SIDE_BY_SIDE:
        _show_beside("results", experiments, [(label, _values(experiments, name, at)) for label, name, at in RESULTS])
        print()
        if different:
            _show_beside("config", experiments, list(different.items()))
        else:
            print("their configs are the same")
        print("\n" * bool(gains), end="")
    if gains:
        _show_gains(gains, moved=len(experiments) <= SIDE_BY_SIDE)
    if why:
        print(f"\n{why}", file=sys.stderr)
    return 0


def _cell(given: Path) -> Path:
    """The only cell of a folder that `ajet eval --out` wrote, or what was given."""
    cells = sorted(file.parent for file in given.glob("*/fingerprint.json")) if given.is_dir() else []
    if len(cells) > 1:
        raise UserError(f"{given} holds several evaluations: name two of {', '.join(map(str, cells))}")
    return cells[0] if cells else given


def _value(experiment: Experiment, metric: str, index: int) -> float | None:
    values = [value for value in experiment.metrics()["series"].get(metric, []) if value is not None]
    return values[index] if values else None


def _values(experiments: Sequence[Experiment], metric: str, index: int) -> list[str]:
    return [number(_value(experiment, metric, index)) for experiment in experiments]


def _show_beside(title: str, experiments: Sequence[Experiment], rows: Sequence[tuple[str, list[str]]]) -> None:
    here = f"{Path.cwd()}{os.sep}"
    table = [
        [label.removeprefix("ajet."), *(value.replace(here, "") for value in values)]
        for label, values in rows
        if set(values) != {"–"}
    ]
    print_table([title, *(experiment.name for experiment in experiments)], table, ends=True)


def _show_sweep(experiments: Sequence[Experiment], different: dict[str, list[str]], gains: Sequence[RunGain]) -> None:
    """A row for each run, the best first, with the keys that differ."""
    here = f"{Path.cwd()}{os.sep}"
    by_name = {gain.name: gain.gain for gain in gains}
    rows = []
    for index, experiment in enumerate(experiments):
        gain = by_name.get(experiment.name)
        values = [_value(experiment, name, -1) for name in ("val/return/mean", "return/mean")]
        shown = ["–" if gain is None else f"{gain.value:+.3f}", "–" if gain is None else f"{gain.p:.2g}"]
        keys = [found[index].replace(here, "") for found in different.values()]
        rows.append((values, [experiment.name, *map(number, values), *shown, *keys]))
    rows.sort(key=lambda row: [value if value is not None else float("-inf") for value in row[0]], reverse=True)
    head = ["run", "validation", "return", "gain", "p", *(key.removeprefix("ajet.") for key in different)]
    print_table(head, [row for _, row in rows], right=(1, 2, 3, 4))
    print(printable(f"gain and p: task by task against {experiments[0].name}\n"))


def _show_gains(gains: Sequence[RunGain], *, moved: bool) -> None:
    """The paired differences, and which tasks moved most."""
    rows = []
    for one in gains:
        gain = one.gain
        label = f"{one.name} against {one.against}"
        if gain is None:
            rows.append([label, "no shared task", *[""] * 5])
            continue
        counts = map(str, (gain.tasks, gain.better, gain.worse))
        rows.append([label, f"{gain.value:+.3f}", gain.interval, f"{gain.p:.2g}", *counts])
    print_table(["task by task", "gain", "95 % interval", "p", "tasks", "better", "worse"], rows, right=range(1, 7))
    for one in gains:
        if one.gain is not None and one.gain.unshared:
            print(printable(f"{one.gain.unshared} tasks are not in both {one.name} and {one.against}, and left out"))
        for title, tasks in (("worse", one.worse), ("better", one.better)) if moved else ():
            for task in tasks:
                query = one_line(task.query, QUERY_LENGTH)
                print(printable(f"  {title:<7} {task.before:.3f} → {task.after:.3f}  {task.task_id}  {query}".rstrip()))


def _as_json(
    experiments: Sequence[Experiment], different: dict[str, list[str]], gains: Sequence[RunGain], why: str
) -> dict[str, Any]:
    runs = [
        {
            "name": experiment.name,
            "results": {label: _value(experiment, name, at) for label, name, at in RESULTS},
            "config": {key: values[index] for key, values in different.items()},
        }
        for index, experiment in enumerate(experiments)
    ]
    shown = [
        {
            **asdict(one),
            "gain": None if one.gain is None else one.gain._asdict(),
            "worse": [task._asdict() for task in one.worse],
            "better": [task._asdict() for task in one.better],
        }
        for one in gains
    ]
    return {"runs": runs, "gains": shown, "warning": why}
