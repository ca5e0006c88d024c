"""Putting new weights into a model that is being served: all of them fit, or none is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ajet.schema.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_into(model: PreTrainedModel, source: Any) -> None:
    """Copy weights from a state dict, or from a folder of safetensors files."""
    weights = source if isinstance(source, Mapping) else read_folder(Path(source))
    own = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(own.keys() - weights.keys() - tied)
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise EngineError(f"these weights are not this model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise EngineError(
                f"weight {name} has shape {tuple(value.shape)}, the served model {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no .safetensors file")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return weights
