"""`ajet rubrics make CONF`: have the rubrics of `judge_type: rubrics_auto_grader` written, and show them."""

from __future__ import annotations

from collections.abc import Sequence

from ajet.schema.errors import EXIT_FAILED, EXIT_INTERRUPTED
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser, fail


def run(argv: Sequence[str]) -> int:
    """Write the rubrics, unless their file is there."""
    parser = CommandParser("ajet rubrics", description="The rubrics by which a model grades answers.")
    parser.add_argument("command", choices=["make"], help="make: write them from the config's graded examples")
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--again", action="store_true", help="write them anew; the earlier file is kept beside it")
    parser.add_argument("--exp-dir", help="where experiments go (default: saved_experiments)")
    arguments = parser.parse_intermixed_args(argv)

    from ajet.config import load_config
    from ajet.observe.experiment import folder_of
    from ajet.observe.logs import log_to_terminal
    from ajet.system.services import yaml_services
    from ajet.task_judge.helper import HelperError
    from ajet.task_judge.rubrics_judge import RubricsJudge

    log_to_terminal()
    config = load_config(arguments.conf, arguments.overrides, complete=False)  # no workflow is needed for this
    config.remember_folder(folder_of(config, arguments.exp_dir, config.yaml_path).resolve())
    judge = RubricsJudge(config)
    there = judge.path.is_file() and not arguments.again
    try:
        with yaml_services(config):
            rubrics = judge.load_or_write(again=arguments.again)
    except HelperError as error:
        return fail(f"no rubrics were written: {error}", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(printable(rubrics.as_text()))
    for key, value in rubrics.about.items():
        print(f"  {key.replace('_', ' ')}: {value}")
    print(f"{'already there' if there else 'written'}: {judge.path}")
    return 0
