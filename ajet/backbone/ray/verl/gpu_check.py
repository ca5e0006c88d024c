"""Whether this machine's GPUs are there and free, asked before minutes are spent on starting."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from ajet.schema.errors import UserError

USED_SHARE = 0.1
"""A GPU with more of its memory in use serves somebody else: verl's engines take what they are told, and fail late."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU, in MiB."""

    index: int
    used: int
    total: int


def check_gpus(needed: int, *, skip_memory: bool = False) -> None:
    """Raise, naming them, if GPUs are missing or in use. Without nvidia-smi nothing can be said."""
    gpus = read_gpus()
    if gpus is None:
        return
    if len(gpus) < needed:
        raise UserError(
            f"ajet.trainer_common.n_gpus_per_node: {needed}, but this machine has {len(gpus)} GPU"
            + ("" if len(gpus) == 1 else "s")
            + f"\n    set it to {len(gpus)}"
        )
    busy = busy_gpus(gpus[:needed])
    if busy and not skip_memory:
        named = ", ".join(f"GPU {gpu.index} ({gpu.used} of {gpu.total} MiB)" for gpu in busy)
        raise UserError(
            f"memory of GPUs is in use already: {named}\n"
            "    end what uses them (nvidia-smi names it), or go on all the same with --skip-check-avail-gpu"
        )


def busy_gpus(gpus: list[GpuMemory]) -> list[GpuMemory]:
    """Those with more memory in use than a driver alone takes."""
    return [gpu for gpu in gpus if gpu.used > USED_SHARE * gpu.total]


def read_gpus() -> list[GpuMemory] | None:
    """What nvidia-smi says; None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> list[GpuMemory]:
    """nvidia-smi's lines of `index, used, total`."""
    gpus = []
    for line in text.strip().splitlines():
        index, used, total = (part.strip() for part in line.split(","))
        gpus.append(GpuMemory(int(index), int(used), int(total)))
    return gpus
