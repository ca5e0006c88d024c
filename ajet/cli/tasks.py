"""A config's tasks and rubrics, before a run: `ajet tasks generate|check CONF` and `ajet rubrics make CONF`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import EXIT_FAILED, TaskDataError
from ajet.schema.printable import printable
from ajet.system.command_line import ArgumentError, CommandParser, fail

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import Task


def run(argv: Sequence[str]) -> int:
    """Read the tasks as a run would, and save them, or say which are both trained on and validated on."""
    parser = CommandParser("ajet tasks", description="The tasks of a config, as a run would have them.")
    parser.add_argument(
        "command",
        choices=["generate", "check"],
        help="generate: write or collect them, and save them; check: find overlap",
    )
    add_config(parser)
    parser.add_argument("--out", type=Path, help="generate: the training tasks, as JSON Lines")
    parser.add_argument(
        "--out-validation", type=Path, help="generate: the validation tasks (default: <out>_validation.jsonl)"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.command == "generate" and arguments.out is None:
        raise ArgumentError("generate needs --out FILE: where the tasks go")
    for flag, path in (("--out", arguments.out), ("--out-validation", arguments.out_validation)):
        if path is not None and path.is_dir():
            raise ArgumentError(f"{flag} {path} is a folder: name a file")

    from ajet.system.services import yaml_services
    from ajet.task_judge.helper import HelperError
    from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

    config = config_of(arguments)
    reader = build_reader(config)
    try:
        with yaml_services(config):
            training, validation = read_training_tasks(reader), read_validation_tasks(reader)
    except HelperError as error:
        return fail(f"{error}\n    what was answered so far is kept: run the command again", EXIT_FAILED)
    if arguments.command == "check":
        return _check(training, validation)
    other = arguments.out_validation or arguments.out.with_name(f"{arguments.out.stem}_validation.jsonl")
    for path, tasks, what in ((arguments.out, training, "train"), (other, validation, "validate")):
        if not tasks and arguments.out_validation is None:  # a file of that name would be somebody's own
            continue
        _write(path, tasks)
        print(f"{len(tasks)} tasks to {what} on: {path}")
    return 0


def _check(training: Sequence[Task], validation: Sequence[Task]) -> int:
    from ajet.task_reader.quality import SAME, overlap_lines

    print(f"{'tasks':<18}{len(training):,} to train on, {len(validation):,} to validate on")
    found = list(overlap_lines(training, validation))
    for label, text in found:
        print(printable(f"{label:<18}{text}"))
    return EXIT_FAILED if any(label == SAME for label, _ in found) else 0


def rubrics(argv: Sequence[str]) -> int:
    """Have the rubrics of `judge_type: rubrics_auto_grader` written, unless their file is there, and show them."""
    parser = CommandParser("ajet rubrics", description="The rubrics by which a model grades answers.")
    parser.add_argument("command", choices=["make"], help="make: write them from the config's graded examples")
    add_config(parser)
    parser.add_argument("--again", action="store_true", help="write them anew; the earlier file is kept beside it")
    arguments = parser.parse_intermixed_args(argv)

    from ajet.system.services import yaml_services
    from ajet.task_judge.rubrics import RubricsJudge

    config = config_of(arguments)
    judge = RubricsJudge(config)
    there = judge.path.is_file() and not arguments.again
    with yaml_services(config):
        found = judge.load_or_write(again=arguments.again)
    print(printable(found.as_text()))
    for key, value in found.about.items():
        print(f"  {key.replace('_', ' ')}: {value}")
    print(f"{'already there' if there else 'written'}: {judge.path}")
    return 0


def add_config(parser: CommandParser) -> None:
    """The arguments of commands that read a config, but run nothing."""
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--exp-dir", help="where experiments go (default: saved_experiments)")


def config_of(arguments: Namespace) -> Config:
    """The config, with the folder of its experiment, where what was answered is kept."""
    from ajet.config import load_config
    from ajet.observe.experiment import folder_of
    from ajet.observe.logs import log_to_terminal

    log_to_terminal()
    config = load_config(arguments.conf, arguments.overrides, complete=False)  # no workflow is needed for this
    config.remember_folder(folder_of(config, arguments.exp_dir, config.yaml_path).resolve())
    return config


def _write(path: Path, tasks: Sequence[Task]) -> None:
    lines = []
    for task in tasks:
        try:
            lines.append(f"{json.dumps(task.model_dump(mode='json'))}\n")
        except ValueError as error:
            raise TaskDataError(
                f"task {task.task_id!r}: its metadata can't be written to {path}, because JSON has no form for it: "
                f"{error}. Leave out what isn't text, numbers, lists or objects of these"
            ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
