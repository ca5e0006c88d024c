"""`ajet config show CONF --backbone trinity`: the configuration that Trinity is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone.ray.settings import training_steps
from ajet.backbone.ray.trinity.config_map import RunFacts, check_honoured, trinity_settings

if TYPE_CHECKING:
    from ajet.config import Config


def show_config(config: Config) -> str:
    """Trinity's final configuration as YAML, after what Trinity can't honour."""
    from ajet.backbone.ray.trinity.launcher import detect_machine, enter_machine, require_trinity

    require_trinity()
    machine = detect_machine()
    enter_machine(machine)
    from omegaconf import OmegaConf

    from ajet.backbone.ray.trinity.compose import compose_trinity_config
    from ajet.task_reader import build_reader, read_training_tasks

    tasks = read_training_tasks(build_reader(config.ajet.task_reader, config.base_dirs))
    facts = RunFacts(
        config.ajet.model.path, config.experiment_path / "checkpoints", training_steps(config, len(tasks)), payload="…"
    )
    composed = compose_trinity_config(trinity_settings(config, facts, machine))
    notes = [f"# {note}" for note in check_honoured(config, machine)]
    return "\n".join([*notes, OmegaConf.to_yaml(OmegaConf.structured(composed))])
