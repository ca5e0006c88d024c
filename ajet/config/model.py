"""`ajet.model`: which model is tuned."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section
from ajet.config.types import NonNegative, Positive, Share


class LoraConfig(Section):
    """`ajet.model.lora`: train small adapters instead of all weights."""

    enabled: bool = False
    """Train LoRA adapters; the base weights stay as they are."""
    rank: Positive = 16
    """Rank of the adapters."""
    alpha: NonNegative = 32
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapters' input while training. Above 0 the trained policy differs from the sampled one."""
    target_modules: list[str] | str = "all-linear"
    """Names of the layers that get an adapter, or `all-linear`."""


class ModelConfig(Section):
    """`ajet.model`: which model is tuned."""

    path: str = "tiny:qwen2-0.3m"
    """A folder, a Hugging Face id such as `Qwen/Qwen2.5-7B-Instruct`, or `tiny:NAME`, a small model built offline."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and computation. `auto`: float32 on CPU, bfloat16 on a GPU."""
    attn: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Attention implementation. `auto` takes the fastest that this machine has."""
    lora: LoraConfig = LoraConfig()
    """Train small adapters instead of all weights."""
