"""Which GPUs the trainer and the engine of a local run work on.

The embedded engine shares the trainer's GPU. An engine of its own gets `rollout.vllm.devices`; without that key, and
with more GPUs than the engines need, it gets those that the trainer leaves free.

`check_kernels` refuses optional kernels that this machine lacks, before a run starts, with the fix.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


log = logging.getLogger("ajet.backbone.local")

DEVICES = "ajet.rollout.vllm.devices"
TRAINER = "ajet.trainer_common.gpu"
KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")
"""What `torch.cuda.get_arch_list` names."""


@dataclass(frozen=True, slots=True)
class Placement:
    trainer: str | None
    """A torch device. None: the first GPU, or the CPU."""
    engine: tuple[int, ...]
    """GPUs, counted among those that the environment shows. Empty: the engine finds its own."""

    @property
    def gpus(self) -> int:
        """How many are at work, on a machine that has any."""
        return len({self.trainer or "cuda:0", *(f"cuda:{gpu}" for gpu in self.engine)})


def place(config: Config, count_gpus: Callable[[], int]) -> Placement:
    """Where this run's parts go. Refuses GPUs that don't exist. They are counted (with torch) only if that matters."""
    rollout, trainer = config.ajet.rollout, config.ajet.trainer_common.gpu
    if rollout.engine != "vllm" and trainer is None:
        return Placement(None, ())
    gpus = count_gpus()
    devices = tuple(rollout.vllm.devices) if rollout.engine == "vllm" else ()
    _check(DEVICES, devices, gpus)
    _check(TRAINER, () if trainer is None else (trainer,), gpus)
    if rollout.engine != "vllm" or not gpus:
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
        none = why_no_gpu()
        raise ConfigError(
            f"{key} names GPU {missing[0]}, and PyTorch finds no CUDA device here ({none.cause}): {none.fix}, or leave "
            "the key out"
        )
    if missing:
        raise ConfigError(
            f"{key} names GPU {missing[0]}, and this machine shows {gpus}, numbered from 0: choose among those"
        )


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_gpu(placement: Placement) -> None:
    """Refuse a GPU for which this PyTorch has no kernels. Warn of one that it can't use at all, as the CPU takes its
    place."""
    import torch

    if torch.cuda.is_available():
        gpu = int((placement.trainer or "cuda:0").removeprefix("cuda:"))
        if (why := why_unfit(gpu)) is not None:
            raise ConfigError(
                f"GPU {gpu}: {why}: install a PyTorch that is built for it (pytorch.org), or hide it with "
                "CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return
    none = why_no_gpu()
    if none.there and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        log.warning("training on the CPU, though there is a GPU: %s. To use it: %s", none.cause, none.fix)


def why_unfit(gpu: int) -> str | None:
    """Why this PyTorch can't compute on a GPU that it finds; None if it can."""
    import torch

    capability, kernels = torch.cuda.get_device_capability(gpu), torch.cuda.get_arch_list()
    if has_kernels(capability, kernels):
        return None
    name = torch.cuda.get_device_name(gpu)
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, and torch {torch.__version__} has kernels for "
        f"{', '.join(kernels)}"
    )


def has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Whether one of these runs on a GPU of this capability: `sm_86` from 8.6 on, below 9; `sm_90a` on 9.0 alone;
    `compute_90` from 9.0 on. Names of another kind aren't judged."""
    known = [found for name in kernels if (found := KERNELS.fullmatch(name))]
    if not known:
        return True
    for kind, major, minor, suffix in (found.groups() for found in known):
        built = (int(major), int(minor))
        if suffix:
            fits = capability == built
        elif kind == "sm":
            fits = capability[0] == built[0] and capability >= built
        else:
            fits = capability >= built
        if fits:
            return True
    return False


class NoGpu(NamedTuple):
    """Why PyTorch finds no CUDA device."""

    there: bool
    """Whether the machine shows a GPU all the same."""
    cause: str
    fix: str


def why_no_gpu() -> NoGpu:
    """The cause and the fix. To be asked only if PyTorch finds none."""
    import torch

    there = any(Path("/dev").glob("nvidia[0-9]*"))
    name, built, hidden = f"torch {torch.__version__}", torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there:
        return NoGpu(there, "the machine has none, or its driver is not loaded", "use a machine with a GPU")
    if built is None:
        return NoGpu(there, f"{name} is a build without CUDA", "pip install torch --force-reinstall")
    serves = _driver_serves()
    if serves is None:
        return NoGpu(there, "libcuda.so.1 of its driver can't be loaded", "install the NVIDIA driver")
    if int(serves.partition(".")[0]) < int(built.partition(".")[0]):
        cause = f"its driver is too old: it serves CUDA {serves}, and {name} is built for {built}"
        return NoGpu(there, cause, "update the NVIDIA driver, or install a torch for an older CUDA")
    if hidden is not None:
        return NoGpu(there, f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES")
    return NoGpu(there, f"{name} can't use it", "python -c 'import torch; torch.zeros(1).cuda()' says why")


def _driver_serves() -> str | None:
    """The newest CUDA that the driver knows. None: there is no driver to ask."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def check_kernels(config: Config, count_gpus: Callable[[], int]) -> None:
    """Refuse `compile` and `logits_kernel` where they can't work. GPUs are counted only if that matters."""
    common = config.ajet.trainer_common
    if common.val_only or not (common.compile or common.logits_kernel == "liger"):
        return
    on_gpu = count_gpus() > 0
    if common.logits_kernel == "liger":
        from ajet.trainer.forward import require_liger

        require_liger("cuda" if on_gpu else "cpu")
    if common.compile and (lacking := why_no_compiler(on_gpu=on_gpu)) is not None:
        raise ConfigError(f"ajet.trainer_common.compile: {lacking}, or leave the key out")


def why_no_compiler(*, on_gpu: bool) -> str | None:
    """What PyTorch's compiler lacks here, and the fix; None if it lacks nothing."""
    if on_gpu and find_spec("triton") is None:
        return "PyTorch's compiler needs Triton on a GPU: pip install triton"
    program = os.environ.get("CC", "gcc") if on_gpu else os.environ.get("CXX", "g++")
    if shutil.which(program) is None:
        return f"PyTorch's compiler needs {program}, which isn't there: apt-get install build-essential"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return f"PyTorch's compiler needs Python's headers, and {headers} has none: apt-get install python3-dev"
    return None
