"""The verl backbone: scale out on verl and Ray. `run(config, experiment, options) -> int` is one run.

Importing this needs neither verl nor torch; without the extra, a run says how to install it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ajet.backbone.metrics import from_verl
from ajet.backbone.ray import launcher
from ajet.backbone.ray.facts import Machine, Remark, check_refused, checkpoint_step, newest_named, planned_facts
from ajet.backbone.ray.start import PLATFORM, NoGpuError, check_gpus, detect_machine, planned_machine, require_library
from ajet.backbone.ray.verl.config import (
    check_honoured,
    compose_verl_config,
    pass_through,
    unknown_keys,
    verl_settings,
)
from ajet.backbone.ray.watcher import Source, Tail
from ajet.schema.errors import UserError

if TYPE_CHECKING:
    from ajet.backbone import LaunchOptions
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder

METRICS_PATH = "VERL_FILE_LOGGER_PATH"
"""Where verl's file logger writes."""


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    return launcher.run(VerlAdapter(), config, experiment, options)


def show_config(config: Config) -> str:
    """The configuration that verl is given, as YAML, after what verl can't honour."""
    from omegaconf import OmegaConf

    adapter = VerlAdapter()
    adapter.require()
    notes: list[object] = []
    try:
        machine = adapter.detect_machine()
    except NoGpuError:
        machine = Machine("cuda")
        notes = [f"for machines with GPUs and flash-attn: this one has no GPU ({PLATFORM}=cpu shows the CPU's)"]
    settings = verl_settings(config, planned_facts(config), machine)
    composed = compose_verl_config(settings, given=pass_through(config))
    notes += check_honoured(config, machine)
    return "\n".join([*(f"# {note}" for note in notes), OmegaConf.to_yaml(composed)])


def planned_notes(config: Config) -> list[Remark]:
    """What a run would refuse or do in part, whether or not it could start on this machine."""
    return [*check_honoured(config, planned_machine()), *unknown_keys(config)]


class VerlAdapter:
    """Implements `BackboneAdapter`."""

    name = "verl"
    title = "verl"
    driver = "ajet.backbone.ray.verl.driver"
    notes = staticmethod(check_honoured)
    settings = staticmethod(verl_settings)

    def require(self) -> None:
        require_library("verl", "verl")

    def detect_machine(self) -> Machine:
        return detect_machine("verl")

    def check(self, config: Config, machine: Machine, options: LaunchOptions) -> None:
        check_refused(list(unknown_keys(config)), self.name)
        common = config.ajet.trainer_common
        gpus = 1 if machine.cpu else common.nnodes * common.n_gpus_per_node
        engine = 1 if machine.cpu else config.ajet.rollout.tensor_model_parallel_size
        for key, size in (
            ("ajet.trainer_common.ulysses_sequence_parallel_size", common.ulysses_sequence_parallel_size),
            ("ajet.rollout.tensor_model_parallel_size", engine),
        ):
            if gpus % size:
                raise UserError(f"{key}: {size} does not divide the {gpus} GPUs of the run (nnodes x n_gpus_per_node)")
        if not machine.cpu:
            check_gpus(common.n_gpus_per_node, skip_memory=options.skip_check_avail_gpu)

    def environment(self, scratch: Path) -> dict[str, str]:
        return {METRICS_PATH: str(scratch / "verl.jsonl"), "HYDRA_FULL_ERROR": "1"}

    def sources(self, config: Config, scratch: Path) -> list[Source]:
        return [Source(Tail(scratch / "verl.jsonl"), from_verl, ends_step=True)]

    def trains(self, config: Config) -> bool:
        return not config.ajet.trainer_common.val_only

    def validates(self, config: Config) -> bool:
        return pass_through(config).get("trainer.test_freq", 1) not in (0, -1)

    def newest_step(self, config: Config, checkpoints: Path) -> int | None:
        """The step of the newest checkpoint, or of the one that `resume` names."""
        given = config.ajet.trainer_common.resume
        return newest_named(checkpoints) if given in ("auto", "never") else checkpoint_step(given)

    def newest_weights(self, config: Config, checkpoints: Path) -> Path | None:
        step = newest_named(checkpoints)
        return None if step is None else checkpoints / f"global_step_{step}" / "actor" / "huggingface"
