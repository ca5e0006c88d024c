"""How many tokens of keys and values the engine may keep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ajet.engine.torch.settings import TorchEngineSettings
from ajet.schema.errors import EngineError

if TYPE_CHECKING:
    from ajet.engine.torch.runner import Runner

CPU_SHARE = 0.25
"""Of the free main memory: episodes, trainer and the user's own program live there too."""
GPU_SHARE = 0.4
"""Of the free GPU memory: the local trainer's activations need the rest."""
FULL_LENGTH_CACHE = 2
"""By default, room for so many times `max_num_seqs` conversations of full length: more is of no use."""


def kv_budget(runner: Runner, settings: TorchEngineSettings) -> int:
    """Tokens that fit: by `kv_cache_gb`, or by a share of the memory that is free now."""
    size = runner.kv_shape.bytes_per_token(runner.dtype)
    if settings.kv_cache_gb is not None:
        tokens = int(settings.kv_cache_gb * 1e9 / size)
    else:
        share = GPU_SHARE if runner.device.type == "cuda" else CPU_SHARE
        tokens = min(
            int(free_bytes(runner.device) * share / size),
            FULL_LENGTH_CACHE * settings.max_num_seqs * settings.max_model_len,
        )
    if tokens < settings.max_model_len:
        raise EngineError(
            f"the memory for keys and values holds {tokens} tokens, fewer than one conversation of max_model_len="
            f"{settings.max_model_len}: raise rollout.kv_cache_gb (a token takes {size} bytes) or lower max_model_len"
        )
    return tokens


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EngineError("/proc/meminfo names no MemAvailable: set rollout.kv_cache_gb")
