"""The layers of a Hugging Face model: which of them are alike, the model cut to its first few, and a forward replaced.

What a model needs is asked of it without its weights, and most of its layers only repeat others. A model cut after the
first layers that show every kind of layer answers as the whole one would, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STATED = ("layer_types", "layers_block_type")
"""Where configurations list the kind of each layer."""


CARRYING = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "gated_delta", "hybrid")
"""In the names of kinds whose layers carry a state from token to token."""


def causal_model(model: Any) -> Any:
    """The model itself, without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> Any:
    """The model's list of layers; None if it keeps them in some other way."""
    from torch import nn

    causal = causal_model(model)
    layers = getattr(causal.base_model, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) and len(layers) else None


def stated_kinds(model: Any) -> list[str]:
    """The kind of each layer that is there, as the configuration calls it. Empty if it calls them nothing."""
    config = model.config.get_text_config()
    kinds: list[str] = next((list(found) for key in STATED if (found := getattr(config, key, None))), [])
    layers = layers_of(model)
    return [str(kind) for kind in (kinds if layers is None else kinds[: len(layers)])]


def carries_state(kind: str) -> bool:
    """Whether layers of this stated kind carry a state from token to token."""
    return any(word in kind for word in CARRYING)


def layer_kinds(layers: Any) -> list[Any]:
    """Equal for layers of the same class whose weights have the same names, shapes and formats."""
    return [
        (type(layer), *((name, each.shape, each.dtype, each.requires_grad) for name, each in layer.named_parameters()))
        for layer in layers
    ]


def period_of(kinds: list[Any]) -> int:
    """How many layers make a period, after which their kinds repeat: all, if they never do."""
    return next(size for size in range(1, len(kinds) + 1) if kinds[size:] == kinds[: len(kinds) - size])


@contextmanager
def replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, this module's forward is another."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Inside, the model has only its first `count` layers."""
    from torch import nn

    layers = layers_of(model)
    causal = causal_model(model)
    causal.base_model.layers = nn.ModuleList(list(layers)[:count])
    try:
        yield
    finally:
        causal.base_model.layers = layers


@contextmanager
def one_layer_of_each_kind(model: Any) -> Iterator[None]:
    """Inside, the model ends after the first layers that show every kind of layer that it has."""
    layers = layers_of(model)
    if layers is None:
        yield
        return
    kinds = layer_kinds(layers)
    stated = stated_kinds(model)
    if len(stated) == len(kinds):
        kinds = list(zip(kinds, stated, strict=True))
    first = [kinds.index(kind) for kind in kinds]
    with first_layers(model, max(first) + 1):
        yield
