"""What a run's optional kernels need of the machine, asked for before anything starts."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


def check_kernels(config: Config, count_gpus: Callable[[], int]) -> None:
    """Refuse `compile` and `logits_kernel` where they can't work. GPUs are counted only if that matters."""
    common = config.ajet.trainer_common
    if common.val_only or not (common.compile or common.logits_kernel == "liger"):
        return
    on_gpu = count_gpus() > 0
    if common.logits_kernel == "liger":
        from ajet.trainer.liger import require_liger

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
