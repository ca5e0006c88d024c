"""Linear layers whose weights are stored in 4 bits (QLoRA), by bitsandbytes: NF4, in blocks of 64 with a
factor each.

A pass computes with the numbers that the 4 bits stand for, in the model's own format; nothing trains them. Embeddings,
norms, biases and the output layer stay whole. Importing this module doesn't load bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command

BLOCK, BLOCKS_TOGETHER = 64, 256
"""Numbers that share a factor of 8 bits, and factors that share one of 32."""
TABLES = 4 * (16 + 256 + 1)
"""Bytes that each layer adds: what 4 bits and what 8 bits stand for, and the factors' mean."""


def linear_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Those that adapters and 4 bits are for: not the output layer, and no routers of experts, whose output isn't a
    tensor."""
    output = model.get_output_embeddings()
    for name, module in model.named_modules():
        if is_linear(module) and module is not output:
            yield name, module


def is_linear(module: Any) -> bool:
    """Whether it is an ordinary linear layer, whole or in 4 bits."""
    return isinstance(module, nn.Linear) and type(module).__name__.endswith(("Linear", "Linear4bit"))


def quantise(model: Any, device: str) -> Any:
    """Put the linear layers' weights into 4 bits, layer by layer, and the model on the device. Returns the model."""
    library = _bitsandbytes()
    for name, whole in list(linear_layers(model)):
        layer = library.nn.Linear4bit(
            whole.in_features,
            whole.out_features,
            bias=False,
            compute_dtype=whole.weight.dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = library.nn.Params4bit(
            whole.weight.detach(), requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        )
        layer.bias = whole.bias
        layer.support_avx512bf16_for_cpu = False  # it would pack them anew for a kernel without a backward pass
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.to(device).eval())
    model.is_loaded_in_4bit = True  # what PEFT asks, to choose its adapters
    return model.to(device)


def parameter_count(parameter: Parameter) -> int:
    """How many weights it holds: a byte of packed ones has two."""
    return parameter.numel() * (2 if _packed(parameter) else 1)


def bytes_in_4_bits(numbers: int) -> int:
    """What a layer's weight takes."""
    blocks = -(-numbers // BLOCK)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // BLOCKS_TOGETHER) + TABLES


def whole_weight(layer: Any) -> Tensor:
    """A linear layer's weight, in the number format in which it computes."""
    weight: Tensor = layer.weight
    if not _packed(weight):
        return weight.detach()
    state: Any = weight.quant_state  # type: ignore[attr-defined]
    whole: Tensor = _bitsandbytes().functional.dequantize_4bit(weight.data, state)
    return whole.to(layer.compute_dtype)


def merged_weights(model: Any) -> dict[str, Tensor]:
    """What a model with adapters saves, by the names in the model alone: whole, the adapters added, in main memory."""
    base = model.get_base_model()
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in base.named_modules():
            if hasattr(module, "get_delta_weight"):
                of = getattr(module, "parameter_name", "weight")  # experts have several
                layer = module.get_base_layer()
                weight = whole_weight(layer) if of == "weight" else getattr(layer, of)
                for adapter in module.active_adapters:
                    weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
                found[f"{_bare(name)}.{of}"] = weight.cpu()
            elif is_linear(module) and _packed(module.weight) and not name.endswith(".base_layer"):
                found[f"{name}.weight"] = whole_weight(module).cpu()
        saved = base.state_dict().keys()
        stored: dict[int, Tensor] = {}  # tied weights stay one tensor, unless only one of them has an adapter
        for name, tensor in (*base.named_parameters(remove_duplicate=False), *base.named_buffers()):
            if name in saved and _bare(name) not in found and not _packed(tensor) and ".lora_" not in name:
                found[_bare(name)] = stored.setdefault(id(tensor), tensor.detach().cpu())
    return found


def _bare(name: str) -> str:
    """A module's name without the wrappings of adapters."""
    return name.replace(".base_layer", "")


def _packed(weight: Any) -> bool:
    return getattr(weight, "quant_state", None) is not None


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependencyError(
            f"ajet.model.lora.base_bits: 4 needs bitsandbytes ({error}): {install_command('bitsandbytes')}"
        ) from error
    return bitsandbytes
