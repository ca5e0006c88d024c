"""`ajet tune CONF`: tune the prompt templates, then train the weights with the
best of them.

ajet tune x.yaml              search in <name>-prompt, then training in <name>
ajet tune x.yaml --rounds 2   both twice: <name>-1-prompt, <name>-1,
                              <name>-2-prompt, <name>-2; the second round begins
                              with the templates and weights of the first
Run it again to resume: what is complete is left as it is.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.launch import LaunchArguments, parse_arguments
from ajet.schema.errors import ConfigError
from ajet.system.command_line import CommandParser, whole

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config


def run(argv: Sequence[str]) -> int:
    """Run all stages that aren't complete. Returns the exit code of the last one that ran."""
    parser = CommandParser(
        "ajet tune", description=__doc__, formatter_class=RawDescriptionHelpFormatter,
        epilog="KEY=VALUE and the flags of `ajet --conf` may follow:\n--exp-dir, --fresh, --quiet, --json",
    )  # fmt: skip
    parser.add_argument("conf", metavar="CONF")
    parser.add_argument("--rounds", type=whole(1), default=1, help="how often to search and train, in turn (1)")
    parser.add_argument("--backbone", default="local", choices=("local", "verl", "trinity"), help="what trains")
    own, rest = parser.parse_known_args(argv)
    from ajet.observe.logs import log_to_terminal

    arguments = parse_arguments(["--conf", own.conf, *rest])
    log_to_terminal(quiet=arguments.options.quiet or arguments.options.json)
    return Stages(arguments, own.rounds, own.backbone).run()


class Stages:
    """The searches and training runs of one command."""

    def __init__(self, arguments: LaunchArguments, rounds: int, backbone: BackboneName) -> None:
        self._arguments, self._rounds, self._backbone = arguments, rounds, backbone
        self._name = self._config("prompt", {}).ajet.experiment_name
        self._config(backbone, {})  # what would end the training is told before the search

    def run(self) -> int:
        from ajet.backbone.prompt import read_best
        from ajet.config.interpolation import literal

        found: dict[str, Any] = {}
        for number in range(1, self._rounds + 1):
            name = self._name if self._rounds == 1 else f"{self._name}-{number}"
            code, search = self._stage("prompt", name, found)
            if code != 0:
                return code
            found["prompt_tuning.templates"] = literal(read_best(search)["templates"])
            code, training = self._stage(self._backbone, name, found)
            if code != 0:
                return code
            found["model.path"] = str((training / "hf").resolve())
        return 0

    def _stage(self, backbone: BackboneName, name: str, found: dict[str, Any]) -> tuple[int, Path]:
        """One run, unless it is complete. Returns its exit code and folder."""
        from ajet.backbone.launch import launch
        from ajet.observe.experiment import OWN_FOLDER, folder_of
        from ajet.observe.run_files import is_complete

        config = self._config(backbone, {**found, "experiment_name": name})
        folder = folder_of(config, self._arguments.exp_dir, config.yaml_path)
        if backbone in OWN_FOLDER:
            folder = folder.with_name(f"{folder.name}-{backbone}")
        if not self._arguments.fresh and is_complete(folder):
            self._say(f"{folder} is complete")
            return 0, folder
        self._say(f"{'search' if backbone == 'prompt' else 'training'}: {folder}")
        stages: tuple[BackboneName, ...] = ("prompt", self._backbone)
        return launch(replace(self._arguments, backbone=backbone, also=stages), config), folder

    def _config(self, backbone: BackboneName, keys: dict[str, Any]) -> Config:
        from ajet.config.loader import load_config

        config = load_config(str(self._arguments.conf), [*self._arguments.overrides, *keys.items()], backbone=backbone)
        if config.ajet.experiment_dir != "auto":
            raise ConfigError(
                "ajet.experiment_dir: `ajet tune` makes several folders\n    use experiment_name and --exp-dir instead"
            )
        return config

    def _say(self, text: str) -> None:
        if not (self._arguments.options.quiet or self._arguments.options.json):
            print(text, flush=True)
