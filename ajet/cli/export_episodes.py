"""`ajet export episodes EXPERIMENT`: recorded episodes for other programs."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

EPILOG = """\
formats:
  jsonl    one episode a line, with everything: tree, ids, logprobs, masks, credit
  parquet  one model call a row: ids, logprobs, mask, advantage as typed columns
  sft      one conversation a line (messages, tools), to fine-tune on

ajet export episodes math_agent good.jsonl --format sft --reward-min 1
"""


def run(argv: Sequence[str]) -> int:
    """Export those that the filters leave."""
    from argparse import RawDescriptionHelpFormatter

    parser = ArgumentParser("ajet export episodes", epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, help="an experiment's folder, or its name in saved_experiments")
    parser.add_argument("target", nargs="?", type=Path, help="file to write (default: episodes.<format> here)")
    parser.add_argument("--format", choices=("jsonl", "parquet", "sft"), default="jsonl")
    for name in ("step", "reward"):
        kind = int if name == "step" else float
        parser.add_argument(f"--{name}-min", type=kind)
        parser.add_argument(f"--{name}-max", type=kind)
    for name in ("task", "group", "status", "agent", "tag", "text"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--validation", choices=("yes", "no"), help="only validation episodes, or none of them")
    arguments = parser.parse_args(argv)

    from ajet.cli.view import find_experiment
    from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
    from ajet.observe.export import ExportFormat, export_episodes

    form = ExportFormat(arguments.format)
    target = arguments.target or Path(f"episodes.{'jsonl' if form is ExportFormat.SFT else form.value}")
    where = EpisodeFilter(
        step_min=arguments.step_min,
        step_max=arguments.step_max,
        reward_min=arguments.reward_min,
        reward_max=arguments.reward_max,
        task=arguments.task,
        group=arguments.group,
        status=arguments.status,
        agent=arguments.agent,
        tag=arguments.tag,
        text=arguments.text,
        validation=None if arguments.validation is None else arguments.validation == "yes",
    )
    store = EpisodeStore(find_experiment(arguments.experiment) / "episodes.sqlite")
    count = export_episodes(store, where, form, target)
    noun = {ExportFormat.JSONL: "episodes", ExportFormat.PARQUET: "model calls", ExportFormat.SFT: "conversations"}[
        form
    ]
    print(f"{count} {noun} in {target}")
    return 0
