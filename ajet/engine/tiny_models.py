"""The `tiny:` models: small, deterministic, built offline. For tests, for teaching, and to try a workflow.

Sizes and weights, written as ordinary Hugging Face folders. Weights are drawn tensor by tensor, in the order of their
names, from one fixed seed: they are the same in every process and under every version of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.engine.tiny_tokenizer import (
    END_OF_TEXT,
    MESSAGE_END,
    TOKENIZER_VERSION,
    VOCABULARY_SIZE,
    token_id,
    write_tokenizer,
)
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch

WEIGHTS_VERSION = 1
"""Raised whenever a model of the same name would come out differently."""
SEED = 20260101
WEIGHT_STD = 0.05
"""More than the usual 0.02: with that, so small a model would hardly react to its input."""
MAX_POSITIONS = 32768
FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True, slots=True)
class TinySize:
    """The shape of a model. Head sizes are at least 32, as vLLM's CPU build requires."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


SIZES = {
    "0.3m": TinySize(hidden=128, layers=2, heads=4, kv_heads=2, head_size=32, intermediate=192),
    "3m": TinySize(hidden=256, layers=4, heads=8, kv_heads=4, head_size=32, intermediate=640),
    "30m": TinySize(hidden=512, layers=10, heads=8, kv_heads=4, head_size=64, intermediate=1408),
}


@dataclass(frozen=True, slots=True)
class TinyName:
    """A parsed `tiny:` name."""

    family: str
    size: str

    @classmethod
    def parse(cls, name: str) -> TinyName:
        """Read what follows `tiny:`: `qwen2-0.3m`, `qwen3`, `30m`, or nothing."""
        family, size = "qwen2", "0.3m"
        for part in filter(None, name.lower().split("-")):
            if part in FAMILIES:
                family = part
            elif part in SIZES:
                size = part
            else:
                raise ConfigError(
                    f"model 'tiny:{name}' does not exist (model.path): {part!r} is neither a family "
                    f"({', '.join(FAMILIES)}) nor a size ({', '.join(SIZES)}). Example: tiny:qwen2-0.3m"
                )
        return cls(family, size)

    def __str__(self) -> str:
        return f"{self.family}-{self.size}"


def model_config(name: TinyName) -> dict[str, Any]:
    """The content of `config.json`."""
    size = SIZES[name.size]
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[name.family]
    return {
        "architectures": [architecture],
        "model_type": name.family,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": WEIGHT_STD,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(MESSAGE_END),
        "pad_token_id": token_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def cache_folder() -> Path:
    """Where built models are kept: `AJET_CACHE`, or `~/.cache/ajet`."""
    return Path(os.environ.get("AJET_CACHE") or Path.home() / ".cache" / "ajet")


def tiny_folder(name: str) -> Path:
    """The folder of a tiny model, built on first use. Several processes may ask at the same time."""
    parsed = TinyName.parse(name)
    folder = cache_folder() / "tiny" / f"{parsed}-v{WEIGHTS_VERSION}.{TOKENIZER_VERSION}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder.parent}: {error.strerror}\n    tiny models are built there: "
                "set AJET_CACHE to a folder that you may write"
            ) from error
        draft = Path(tempfile.mkdtemp(prefix=f".{parsed}-", dir=folder.parent))
        try:
            write_model(draft, parsed)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_model(folder: Path, name: TinyName) -> None:
    """Write configuration, weights and tokenizer."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(model_config(name), indent=2))
    ends = {"eos_token_id": [token_id(MESSAGE_END), token_id(END_OF_TEXT)], "pad_token_id": token_id(END_OF_TEXT)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    save_file(draw_weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, name.family)


def draw_weights(name: TinyName) -> dict[str, torch.Tensor]:
    """The model's tensors under Hugging Face's names: norms are 1, biases 0, matrices normally distributed."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for key, shape in sorted(weight_shapes(name).items()):
        if key.endswith("norm.weight"):
            weights[key] = torch.ones(shape)
        elif key.endswith(".bias"):
            weights[key] = torch.zeros(shape)
        else:
            weights[key] = torch.randn(shape, generator=generator) * WEIGHT_STD
    return weights


def weight_shapes(name: TinyName) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; the output layer shares the embedding's."""
    size = SIZES[name.size]
    query, keys = size.heads * size.head_size, size.kv_heads * size.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY_SIZE, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    for layer in range(size.layers):
        part = {
            "input_layernorm.weight": (size.hidden,),
            "post_attention_layernorm.weight": (size.hidden,),
            "self_attn.q_proj.weight": (query, size.hidden),
            "self_attn.k_proj.weight": (keys, size.hidden),
            "self_attn.v_proj.weight": (keys, size.hidden),
            "self_attn.o_proj.weight": (size.hidden, query),
            "mlp.gate_proj.weight": (size.intermediate, size.hidden),
            "mlp.up_proj.weight": (size.intermediate, size.hidden),
            "mlp.down_proj.weight": (size.hidden, size.intermediate),
        }
        if name.family == "qwen2":
            part |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (keys,)}
            part |= {"self_attn.v_proj.bias": (keys,)}
        if name.family == "qwen3":
            part |= {"self_attn.q_norm.weight": (size.head_size,), "self_attn.k_norm.weight": (size.head_size,)}
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in part.items()}
    return shapes
