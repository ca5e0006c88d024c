"""`ajet config show CONF --backbone verl`: the configuration that verl is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone.ray.machine import Machine
from ajet.backbone.ray.verl.config_map import RunFacts, check_honoured, pass_through, verl_settings

if TYPE_CHECKING:
    from ajet.config import Config


def show_config(config: Config) -> str:
    """verl's final configuration as YAML, after what verl can't honour."""
    from ajet.backbone.ray.verl.launcher import NoGpuError, detect_machine, require_verl

    require_verl()
    from omegaconf import OmegaConf

    from ajet.backbone.ray.verl.compose import compose_verl_config
    from ajet.task_reader import build_reader, read_training_tasks

    remarks: list[str] = []
    try:
        machine = detect_machine()
    except NoGpuError:
        machine = Machine("cuda")
        remarks = ["# for machines with GPUs and flash-attn: this one has no GPU (VERL_PLATFORM=cpu shows the CPU's)"]
    tasks = read_training_tasks(build_reader(config.ajet.task_reader, config.base_dirs))
    facts = RunFacts(
        config.ajet.model.path,
        config.experiment_path / "checkpoints",
        len(tasks),
        resume=config.ajet.trainer_common.resume,
    )
    composed = compose_verl_config(verl_settings(config, facts, machine), given=pass_through(config))
    notes = [f"# {note}" for note in check_honoured(config, machine)]
    return "\n".join([*remarks, *notes, OmegaConf.to_yaml(composed)])
