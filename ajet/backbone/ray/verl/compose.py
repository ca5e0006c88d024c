"""The final configuration of verl: its own defaults, our settings, the user's pass-through. Needs verl."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ajet.backbone.ray.settings import flatten
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

ADDABLE = (
    "data.ajet_run",
    "actor_rollout_ref.model.override_config.",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.actor.optim.override_optimizer_config.",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "ray_kwargs.",
)
"""Keys that verl reads but does not list among its defaults."""


def compose_verl_config(settings: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> DictConfig:
    """verl's configuration with these settings. `given`: what the user wrote for verl; must name keys verl has.

    A key that begins with `+` is added without being checked, as in verl's own command line.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict

    with initialize_config_module("verl.trainer.config", version_base=None):
        config: DictConfig = compose("ppo_trainer")
    known = {key for key, _ in flatten(_plain(config))}
    for key in given or {}:
        _check_known(key, known)
    OmegaConf.set_struct(config, False)
    with open_dict(config):
        for key, value in settings.items():
            OmegaConf.update(config, key.removeprefix("+"), value, merge=False, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


def _plain(config: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_known(key: str, known: set[str]) -> None:
    if key.startswith("+") or key.startswith(ADDABLE):
        return
    parents = {name.rsplit(".", count)[0] for name in known for count in range(1, name.count(".") + 1)}
    if key in known or key in parents:
        return
    near = get_close_matches(key, known, n=1)
    raise ConfigError(
        f"verl has no key {key!r}" + (f": did you mean {near[0]}?" if near else "") + f" (`+{key}` adds it unchecked)"
    )
