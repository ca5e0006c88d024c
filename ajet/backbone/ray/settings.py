"""Pieces that the mappings to verl's and Trinity's configuration have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ajet.backbone.ray.machine import Machine

if TYPE_CHECKING:
    from ajet.config import Config


def training_steps(config: Config, training_tasks: int) -> int:
    """Steps of the run: `total_training_steps`, or what `total_epochs` come to."""
    common = config.ajet.trainer_common
    if common.total_training_steps is not None:
        return common.total_training_steps
    return -(-common.total_epochs * training_tasks // config.ajet.data.train_batch_size)


def flatten(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested mapping."""
    for key, value in block.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        else:
            yield name, value


def micro_tokens(config: Config) -> int:
    """Tokens of one forward and backward pass on one GPU; a row must fit."""
    ajet = config.ajet
    longest = ajet.data.max_prompt_length + ajet.data.max_response_length
    asked = ajet.trainer_common.micro_tokens
    return max(longest, 16384 if asked == "auto" else asked)


def resolved_dtype(dtype: str, machine: Machine) -> str:
    """The number format of computation."""
    return ("float32" if machine.cpu else "bfloat16") if dtype == "auto" else dtype
