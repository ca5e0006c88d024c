"""`ajet eval CONF`: validation alone, on the configured model or a checkpoint, with any engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser

if TYPE_CHECKING:
    from ajet.config import Config


def run(argv: Sequence[str]) -> int:
    """Validate and print the metrics. Returns 1 if no episode got a reward."""
    parser = CommandParser("ajet eval", description=__doc__)
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="a checkpoint (step_N), or an experiment: its newest")
    parser.add_argument("--best", action="store_true", help="of an experiment: the checkpoint with the best validation")
    parser.add_argument("--json", action="store_true", help="print all metrics as one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    from ajet.backbone.report import evaluate
    from ajet.cli.targets import weights_folder
    from ajet.cli.view import find_experiment
    from ajet.config.loader import load_config
    from ajet.system.services import yaml_services

    config = load_config(arguments.conf, arguments.overrides, backbone="debug")  # which trains nothing, with any engine
    if arguments.checkpoint:
        config.ajet.model.path = str(weights_folder(find_experiment(Path(arguments.checkpoint)), best=arguments.best))
    with yaml_services(config):
        metrics = evaluate(config)
    if arguments.json:
        print(json.dumps(metrics))
    else:
        _show(config, metrics)
    return 0 if metrics.get("val/episode/usable") else 1


def _show(config: Config, metrics: dict[str, float]) -> None:
    print(f"model      {config.ajet.model.path}")
    names = ["val/return/mean", "val/reward/mean", "val/success", "val/failed_share"]
    names += sorted(name for name in metrics if "pass@" in name or name.startswith(("val/tag/", "val/status/")))
    for name in names:
        if name in metrics:
            print(f"{printable(name.removeprefix('val/')):32} {metrics[name]:10.4f}")
