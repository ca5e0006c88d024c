"""`CompiledForward`: the same passes with the model's layers compiled by PyTorch's compiler.

A layer is what the compiler gets, not the whole model: all layers of a kind share what is compiled, and the code around
them (masks, chunks of logits) stays as it is. The attention of packs is left out: on a CPU it goes block by block, and
FlexAttention is compiled by itself. Sizes are unknowns to the compiler (`dynamic`), so packs of any length share the
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ajet.trainer.attention import attention_left_whole
from ajet.trainer.forward import EdgeLogprobs, Entropy, Forward
from ajet.trainer.pack import Pack

MOST_VARIANTS = 32
"""Of a function, before PyTorch leaves it as it is: with and without gradients, one row or several, adapters on or
off, trained or frozen weights. Its own limit is 8."""

CHECKPOINTING = "forward_with_checkpointing"
"""The function that transformers puts around a layer's own code."""


@dataclass(frozen=True, slots=True)
class CompiledForward:
    """Runs another executor on compiled layers."""

    inner: Forward

    @contextmanager
    def session(self, model: Any) -> Iterator[None]:
        with self.inner.session(model), compiled_layers(model):
            yield

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        return self.inner(model, pack, entropy=entropy)


def layers_to_compile(model: Any) -> list[Any]:
    """The model's layers, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def compiled_layers(model: Any) -> Iterator[None]:
    """Inside it (forward *and* backward), the layers run compiled; afterwards they are what they were."""
    layers = layers_to_compile(model)
    attention_left_whole()
    for layer in layers:
        layer.__dict__["forward"] = partial(_run, layer)
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
            yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _run(layer: Any, *inputs: Any, **options: Any) -> Any:
    """A layer's forward. Newer versions of transformers checkpoint in there, older ones around it."""
    kind: Any = type(layer)
    own, checkpoints = _compiled(kind)
    call = partial(own, layer, **options)
    if checkpoints and layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(call, *inputs)
    return call(*inputs)


@cache
def _compiled(kind: Any) -> tuple[Any, bool]:
    """The layer's own code compiled, and whether a function that checkpoints was around it."""
    forward, checkpoints = kind.forward, False
    while forward.__code__.co_name == CHECKPOINTING:
        forward, checkpoints = forward.__wrapped__, True
    return torch.compile(forward, dynamic=True), checkpoints
