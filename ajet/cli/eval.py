"""`ajet eval CONF`: play the validation tasks, or those of files, with one or several models, and compare them.

Nothing is trained. With `--out` the episodes are kept, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import EXIT_FAILED
from ajet.schema.files import json_line
from ajet.schema.printable import printable
from ajet.system.command_line import ArgumentError, CommandParser, real, whole

if TYPE_CHECKING:
    from ajet.backbone.evaluation import Evaluation, EvaluationCell
    from ajet.config import Config
    from ajet.observe.statistics import Gain, Share
    from ajet.schema.episode import Episode


def run(argv: Sequence[str]) -> int:
    """Returns 1 if a cell has no episode with a reward, episodes could not be kept, or the last model is below
    `--fail-under`."""
    arguments = _parser().parse_intermixed_args(argv)
    from ajet.backbone.evaluation import BASE, play
    from ajet.backbone.launch import last_error
    from ajet.config.loader import load_config
    from ajet.observe.logs import log_to_terminal
    from ajet.system.services import yaml_services

    log_to_terminal(quiet=arguments.json)
    config = load_config(arguments.conf, arguments.overrides, backbone="debug")  # which trains nothing, with any engine
    models = arguments.model or [BASE]
    for what, names in (("--model", models), ("--tasks", [file.stem for file in arguments.tasks])):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ArgumentError(f"{what} {twice[0]}: two have this name, and results are told apart by it")
    cells = {model: list(_cells(arguments, config, model)) for model in models}
    simple = len(models) == 1 and len(arguments.tasks) <= 1
    found: list[Evaluation] = []
    with yaml_services(config), last_error() as logged:
        for of_model in cells.values():
            try:
                with _progress(of_model) as on_episode:
                    play(of_model, on_episode)
            except KeyboardInterrupt:
                if arguments.out is not None:
                    print(f"interrupted; the same command goes on from {arguments.out}", file=sys.stderr)
                raise
            found += [cell.evaluation() for cell in of_model]
    if arguments.json:
        print(json_line(_flat(found[0]) if simple else _as_json(found), ascii_only=True), end="")
    elif simple:
        _show_one(cells[models[0]][0].config, found[0])
    else:
        _show_all(found)
    _tell_failures(found)
    if arguments.html is not None:
        _write_html(arguments.html, found)
    if logged.lost or not all(one.rewards for one in found):
        return EXIT_FAILED
    return _verdict([one for one in found if one.model == models[-1]], arguments.fail_under)


def _parser() -> CommandParser:
    parser = CommandParser("ajet eval", description=__doc__)
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--model", "--checkpoint", action="append", default=[], metavar="MODEL",
        help="`base` (the config's), a run, a checkpoint, a model folder, hub id or tiny:NAME, or NAME@URL of an "
        "OpenAI-compatible server. Repeat it: each is compared with the first",
    )  # fmt: skip
    parser.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best validation")
    parser.add_argument(
        "--tasks", action="append", default=[], type=Path, metavar="FILE",
        help="JSON lines of tasks, instead of the config's validation tasks. Repeatable",
    )  # fmt: skip
    attempts = "attempts at each task, sampled if several (default: val_pass_n)"
    parser.add_argument("-n", "--repeats", type=whole(1), metavar="N", help=attempts)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the episodes; run it again to go on")
    price = real(0, 1e6)
    parser.add_argument("--price-input", type=price, default=0.0, help="of a million tokens, for models at a URL")
    parser.add_argument("--price-output", type=price, default=0.0)
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the tables as one HTML file")
    parser.add_argument(
        "--fail-under", type=real(0, 1), metavar="SHARE", help="return 1 if pass@1 of the last model is below this"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _cells(arguments: Namespace, config: Config, model: str) -> Iterator[EvaluationCell]:
    """Make a cell for each file of tasks."""
    from ajet.backbone.evaluation import EvaluationCell, Price, model_keys, tasks_keys
    from ajet.config.loader import load_config

    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        raise ArgumentError(f"--out {arguments.out} is not a folder")
    played = model_keys(_resolved(model, best=arguments.best), config.ajet.rollout.engine)
    hosted = "://" in model
    price = Price(arguments.price_input, arguments.price_output) if hosted else Price()
    for file in arguments.tasks or [None]:
        keys = played | (tasks_keys(file) if file is not None else {})
        made = load_config(arguments.conf, [*arguments.overrides, *keys.items()], backbone="debug")
        name = file.stem if file is not None else "validation"
        yield EvaluationCell.of(
            made, arguments.repeats, model_name=model, tasks_name=name, out=arguments.out, price=price
        )


def _resolved(model: str, *, best: bool) -> str:
    """A run or checkpoint as the folder of its weights."""
    from ajet.backbone.evaluation import BASE
    from ajet.cli.targets import find_experiment, weights_folder, weights_of

    if model == BASE or "://" in model:
        return model
    folder = find_experiment(Path(model))
    return str(weights_folder(folder, best=best)) if folder.is_dir() else weights_of(model)


@contextmanager
def _progress(cells: Sequence[EvaluationCell]) -> Iterator[Callable[[EvaluationCell, Episode], None]]:
    """Show a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not terminal) as bar:
        bars = {
            id(cell): bar.add_task(f"{cell.model_name}, {cell.tasks_name}"[:40], total=len(cell.tasks) * cell.repeats)
            for cell in cells
        }
        yield lambda cell, episode: bar.advance(bars[id(cell)])


# ---------------------------------------------------------------- what it says


def _gains(found: Sequence[Evaluation]) -> Iterator[tuple[Evaluation, Evaluation, Gain | None]]:
    """Each model but the first, the first on the same tasks, and the difference."""
    for one in found:
        first = next(other for other in found if other.tasks == one.tasks)
        if one is not first:
            yield one, first, one.gain_over(first)


def _flat(one: Evaluation) -> dict[str, float]:
    """The metrics, and beside pass@k the ends of their intervals."""
    metrics = dict(one.metrics)
    for name, share in _intervals(one).items():
        metrics |= {name: share.value, f"{name}/low": share.low, f"{name}/high": share.high}
    return metrics


def _intervals(one: Evaluation) -> dict[str, Share]:
    """The interval of each metric. Where attempts failed, the share of successes isn't pass@1, the mean over the tasks,
    whose interval this is: it then has a name of its own."""
    found = {f"val/success/pass@{k}": share for k, share in one.pass_at.items()}
    first = found.get("val/success/pass@1")
    if first is not None and math.isclose(first.value, one.metrics["val/success"], abs_tol=1e-9):
        found["val/success"] = found.pop("val/success/pass@1")
    return found


def _as_json(found: Sequence[Evaluation]) -> dict[str, Any]:
    gains = [
        {
            "model": one.model,
            "against": first.model,
            "tasks_name": one.tasks,
            **(gain._asdict() if gain else {"value": None}),
        }
        for one, first, gain in _gains(found)
    ]
    return {"cells": [one.as_json() for one in found], "gains": gains}


def _show_one(config: Config, one: Evaluation) -> None:
    intervals = _intervals(one)
    metrics = one.metrics | {name: share.value for name, share in intervals.items()}
    print(f"model      {printable(config.ajet.rollout.remote.model or config.ajet.model.path)}")
    names = ["val/return/mean", "val/reward/mean", "val/success", "val/failed_share"]
    names += sorted(name for name in metrics if "pass@" in name or name.startswith(("val/tag/", "val/status/")))
    for name in names:
        if name in metrics:
            share = intervals.get(name)
            interval = f"  ({share.low:.4f} … {share.high:.4f})" if share is not None else ""
            digits = 0 if name.startswith("val/status/") else 4
            print(f"{printable(name.removeprefix('val/')):32} {metrics[name]:10.{digits}f}{interval}")
    if one.cost is not None:
        print(f"{'cost':32} {one.cost:10.4f}")


def _show_all(found: Sequence[Evaluation]) -> None:
    from ajet.cli.runs import print_table

    for number, tasks in enumerate(dict.fromkeys(one.tasks for one in found)):
        cells = [one for one in found if one.tasks == tasks]
        print(
            "\n" * bool(number)
            + printable(f"{tasks}: {max(len(one.rewards) for one in cells)} tasks × {cells[0].repeats}")
        )
        head, rows = table(cells)
        print_table(head, rows, right=tuple(range(1, len(head))), spare=("s/episode", "reply", "prompt"))


def _tell_failures(found: Sequence[Evaluation]) -> None:
    """The most frequent ones, with the user's line."""
    for one in found:
        for reason, count in list(one.failures.items())[:3]:
            print(printable(f"{one.model} on {one.tasks}: {count} × {reason}"[:300]), file=sys.stderr)


def table(cells: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """The models on one set of tasks, a row each. Columns in which nothing stands are left out."""
    most = max((k for one in cells for k in one.pass_at), default=1)
    gains = {id(one): gain for one, _, gain in _gains(cells)}
    head = ["model", "pass@1", *([f"pass@{most}"] if most > 1 else []), "return", "gain", "p", "failed"]
    head += ["prompt", "reply", "s/episode", "cost"]
    rows = []
    for one in cells:
        gain = gains.get(id(one))
        shares = [one.pass_at.get(k) for k in dict.fromkeys((1, most))]
        mean = one.metrics.get("val/return/mean")
        rows.append([
            one.model,
            *("–" if share is None else f"{share.value:.3f} ({share.low:.3f} … {share.high:.3f})" for share in shares),
            "–" if mean is None else f"{mean:.3f}",
            "" if gain is None else f"{gain.value:+.3f} ({gain.interval})",
            "" if gain is None else f"{gain.p:.2g}",
            str(one.episodes - sum(map(len, one.rewards.values()))),
            f"{one.prompt_tokens:,}",
            f"{one.reply_tokens:,}",
            f"{one.seconds:.2f}",
            "" if one.cost is None else f"{one.cost:.4f}",
        ])  # fmt: skip
    shown = [index for index in range(len(head)) if any(row[index] for row in rows)]
    return [head[index] for index in shown], [[row[index] for index in shown] for row in rows]


def _write_html(file: Path, found: Sequence[Evaluation]) -> None:
    from ajet.observe.viewer import write_tables

    sections = []
    for tasks in dict.fromkeys(one.tasks for one in found):
        cells = [one for one in found if one.tasks == tasks]
        head, rows = table(cells)
        sections.append((tasks, head, rows))
        names = sorted({task for one in cells for task in one.rewards})
        by_task = [one.mean_rewards for one in cells]
        values = [[task, *("–" if task not in one else f"{one[task]:.3f}" for one in by_task)] for task in names]
        sections.append((f"{tasks}, mean reward of each task", ["task", *(one.model for one in cells)], values))
    write_tables(file, "Evaluation", sections)


def _verdict(last: Sequence[Evaluation], least: float | None) -> int:
    """Say where the last model falls short. Returns the exit code."""
    low = [one for one in last if least is not None and (1 not in one.pass_at or one.pass_at[1].value < least)]
    for one in low:
        print(
            f"pass@1 of {printable(one.model)} on {printable(one.tasks)} is {one.pass_at[1].value:.4f}, "
            f"below --fail-under {least:g}",
            file=sys.stderr,
        )
    return EXIT_FAILED if low else 0
