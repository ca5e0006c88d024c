"""The models that commands name: `TARGET` of `ajet chat`, `serve` and `vllm`, `--checkpoint` of `ajet eval`.

A target is a YAML file, an experiment or checkpoint folder (its `hf/` weights), a model folder, a hub id, or
`tiny:<name>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config

DEFAULT_LENGTH = 8192
"""Tokens of a conversation, unless a YAML file sets `rollout.max_model_len`."""


def target_config(target: str, overrides: Sequence[str] = ()) -> Config:
    """The config with which to talk to a target."""
    from ajet.config import load_config, make_config

    if target.endswith((".yaml", ".yml")):
        # nothing is trained: no workflow is needed, and an engine that only talks will do
        return load_config(target, overrides, backbone="debug", complete=False)
    if overrides:
        raise ConfigError(f"overrides ({overrides[0]} …) need a YAML file as TARGET, and {target} isn't one")
    return make_config(
        {
            "model.path": weights_of(target),
            "rollout.engine": "torch",
            "rollout.max_model_len": DEFAULT_LENGTH,
            "rollout.temperature": 1.0,
        }
    )


def weights_of(target: str) -> str:
    """The model that a target names: the `hf/` folder of an experiment or checkpoint, or else the target itself."""
    folder = Path(target).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return target
    if (folder / "hf" / "config.json").is_file():
        return str((folder / "hf").resolve())
    raise ConfigError(
        f"{target} holds no weights: neither hf/config.json nor config.json (has the run saved a step yet?)"
    )


def weights_folder(folder: Path, *, best: bool = False) -> Path:
    """The Hugging Face folder of an experiment's newest (or best) checkpoint, of a checkpoint, or the folder itself."""
    if (folder / "checkpoints").is_dir():
        from ajet.trainer.checkpoint import CheckpointFolder

        checkpoints = CheckpointFolder(folder / "checkpoints")
        newest = checkpoints.newest()
        chosen = checkpoints.best() if best else newest.path if newest is not None else None
        if chosen is not None:
            return chosen / "hf"
        if best:
            raise ConfigError(f"{folder} holds no checkpoint with a validation")
        # verl's checkpoints have their own format; its newest weights are in hf/
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    return Path(weights_of(str(folder)))
