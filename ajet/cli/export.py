"""`ajet export`: weights or episodes of a run for other programs.

ajet export weights EXPERIMENT FOLDER [--best]       a Hugging Face folder (LoRA merged), with a model card
ajet export episodes EXPERIMENT FILE [--format …]    jsonl, parquet, or conversations to fine-tune on (sft)
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from ajet.schema.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Export, and say where it is."""
    if argv and argv[0] == "episodes":
        from ajet.cli import export_episodes

        return export_episodes.run(argv[1:])
    parser = ArgumentParser("ajet export", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="weights|episodes")
    weights = kinds.add_parser("weights", help="a Hugging Face folder")
    weights.add_argument("experiment", type=Path)
    weights.add_argument("target", type=Path)
    weights.add_argument("--best", action="store_true", help="the checkpoint with the best validation, not the newest")
    weights.add_argument("--force", action="store_true", help="replace what is there")
    weights.set_defaults(export=_weights)
    kinds.add_parser("episodes", help="recorded episodes, with filters: `ajet export episodes --help`")
    arguments = parser.parse_args(argv)
    print(arguments.export(arguments))
    return 0


def _weights(arguments: Namespace) -> str:
    from ajet.cli.eval import weights_folder
    from ajet.trainer.model_card import model_card

    source = weights_folder(arguments.experiment, best=arguments.best)
    target: Path = arguments.target
    if target.exists() and any(target.iterdir()):
        if not arguments.force:
            raise ConfigError(f"{target} is not empty: choose another folder, or --force")
        shutil.rmtree(target)
    shutil.copytree(source.resolve(), target, dirs_exist_ok=True)
    (target / "README.md").write_text(model_card(arguments.experiment, source), encoding="utf-8")
    return f"{target}: weights of {source.resolve().parent.name}, loadable with transformers and vLLM"
