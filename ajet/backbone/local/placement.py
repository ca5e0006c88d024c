"""Which GPUs the trainer and the engine of a local run work on.

The embedded engine shares the trainer's GPU. An engine of its own gets `rollout.vllm.devices`; without that key, and
with more GPUs than the engines need, it gets those that the trainer leaves free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config

DEVICES = "ajet.rollout.vllm.devices"
TRAINER = "ajet.trainer_common.gpu"


@dataclass(frozen=True, slots=True)
class Placement:
    """Who works where."""

    trainer: str | None
    """A torch device. None: the first GPU, or the CPU."""
    engine: tuple[int, ...]
    """GPUs, counted among those that the environment shows. Empty: the engine finds its own."""


def place(config: Config, count_gpus: Callable[[], int]) -> Placement:
    """Where this run's parts go. Refuses GPUs that don't exist. They are counted (with torch) only if that matters."""
    rollout, trainer = config.ajet.rollout, config.ajet.trainer_common.gpu
    if rollout.engine != "vllm" and trainer is None:
        return Placement(None, ())
    gpus = count_gpus()
    devices = tuple(rollout.vllm.devices) if rollout.engine == "vllm" else ()
    _check(DEVICES, devices, gpus)
    _check(TRAINER, () if trainer is None else (trainer,), gpus)
    if rollout.engine != "vllm" or rollout.vllm.mode != "server" or not gpus:
        return Placement(None if trainer is None else f"cuda:{trainer}", devices)
    needed = rollout.n_vllm_engine * rollout.tensor_model_parallel_size
    if devices:
        free = [gpu for gpu in range(gpus) if gpu not in devices]
        chosen = trainer if trainer is not None else (free or devices)[0]
        return Placement(f"cuda:{chosen}", devices)
    chosen = trainer or 0
    others = [gpu for gpu in range(gpus) if gpu != chosen]
    if len(others) >= needed:
        return Placement(f"cuda:{chosen}", tuple(others[:needed]))
    if gpus < needed:
        raise ConfigError(
            f"ajet.rollout.n_vllm_engine: {rollout.n_vllm_engine} engines on {rollout.tensor_model_parallel_size} GPUs "
            f"each need {needed}, and this machine shows {gpus}: lower n_vllm_engine or tensor_model_parallel_size"
        )
    return Placement(f"cuda:{chosen}", tuple(range(needed)))


def _check(key: str, named: Sequence[int], gpus: int) -> None:
    missing = [gpu for gpu in named if gpu >= gpus]
    if missing and not gpus:
        raise ConfigError(
            f"{key} names GPU {missing[0]}, and PyTorch finds no CUDA device here ({_why_none()}): leave the key out"
        )
    if missing:
        raise ConfigError(
            f"{key} names GPU {missing[0]}, and this machine shows {gpus}, numbered from 0: choose among those"
        )


def visible_gpus() -> int:
    """CUDA devices that the trainer could use."""
    import torch

    return torch.cuda.device_count()


def _why_none() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "the machine has none, or its driver is not loaded"
    return f"the driver is too old for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES hides them"
