"""`ajet eval CONF`: validation alone, on the configured model or a checkpoint, with any engine."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


def run(argv: Sequence[str]) -> int:
    """Validate and print what came out. 1 if no episode could be judged."""
    parser = ArgumentParser("ajet eval", description=__doc__)
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="a checkpoint (step_N), or an experiment: its newest")
    parser.add_argument("--best", action="store_true", help="of an experiment: the checkpoint with the best validation")
    parser.add_argument("--json", action="store_true", help="print all metrics as one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    from ajet.backbone.validation import evaluate
    from ajet.config.loader import load_config

    config = load_config(arguments.conf, arguments.overrides, backbone="debug")  # which trains nothing, with any engine
    if arguments.checkpoint:
        config.ajet.model.path = str(weights_folder(Path(arguments.checkpoint), best=arguments.best))
    metrics = evaluate(config)
    if arguments.json:
        print(json.dumps(metrics))
    else:
        _show(config, metrics)
    return 0 if metrics.get("val/episode/usable") else 1


def weights_folder(path: Path, *, best: bool = False) -> Path:
    """The Hugging Face folder of an experiment, of a checkpoint, or the folder itself."""
    if (path / "checkpoints").is_dir():
        from ajet.trainer.checkpoint import CheckpointFolder

        folder = CheckpointFolder(path / "checkpoints")
        newest = folder.newest()
        chosen = folder.best() if best else newest.path if newest is not None else None
        if chosen is None and not best and (path / "hf" / "config.json").is_file():
            return path / "hf"  # verl's checkpoints have a form of their own; its newest weights lie here
        if chosen is None:
            what = "checkpoint with a validation" if best else "complete checkpoint"
            raise ConfigError(f"{path} holds no {what}")
        return chosen / "hf"
    for folder_path in (path / "hf", path):
        if (folder_path / "config.json").is_file():
            return folder_path
    raise ConfigError(f"{path} is no experiment, no checkpoint and no Hugging Face folder")


def _show(config: Config, metrics: dict[str, float]) -> None:
    print(f"model      {config.ajet.model.path}")
    names = ["val/reward/mean", "val/success"]
    names += sorted(name for name in metrics if "pass@" in name or name.startswith(("val/tag/", "val/status/")))
    for name in names:
        if name in metrics:
            print(f"{name.removeprefix('val/'):32} {metrics[name]:10.4f}")
