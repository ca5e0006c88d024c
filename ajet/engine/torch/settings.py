"""What the embedded engine is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """Limits and modes of the embedded engine."""

    max_model_len: int = 18000
    """Tokens of prompt and reply together."""
    max_num_seqs: int = 64
    """Replies drawn at the same time."""
    tokens_per_step: int = 1024
    """Tokens that a forward pass computes at most: long prompts are cut, so that replies in flight go on meanwhile."""
    kv_cache_gb: float | None = None
    """Memory for keys and values, of replies in flight and cached prefixes together. None: a share of what is free."""
    prefix_cache: bool = True
    deterministic: bool = False
    """Fixed shapes: what a request gets depends on nothing but its prompt, its parameters, its seed and the weights."""
    seed: int = 0
    """For requests that bring no seed."""
    dtype: str = "auto"
    attn: str = "auto"
    device: str | None = None

    @classmethod
    def from_config(cls, config: Any) -> TorchEngineSettings:
        """Read `ajet.model` and `ajet.rollout`."""
        rollout, model = config.ajet.rollout, config.ajet.model
        return cls(
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_gb=rollout.kv_cache_gb,
            deterministic=rollout.deterministic,
            seed=rollout.seed,
            dtype=model.dtype,
            attn=model.attn,
        )
