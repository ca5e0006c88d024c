"""Which experts a mixture sends a token to: noted while an engine samples, and followed while the trainer computes.

A router chooses the experts with the highest scores. A rounding error may change the choice, and then the trainer's
probability of a token isn't the sampler's any more, by far more than rounding. Where routes are followed, the choice
is the sampler's, and its weights come from the trainer's own scores, as the model computes them from these.

Shapes: T tokens, L layers with a router, K experts of a token, B rows, N tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ajet.engine.layers import causal_model, replaced
from ajet.schema.errors import EngineError, FeatureUnavailableError

KEY = "ajet.rollout.routing_replay"
ROUTER = "TopKRouter"
"""How transformers' names of routers end that choose by one `torch.topk` and return the choice last."""
ARGUMENT = "ajet_experts"
"""The argument of a model's forward that brings the routes to follow: [B, N, L, K]; -1 where none was noted. vLLM notes
all layers, and L is their number; the embedded engine those with a router."""

CHECKPOINTS = "_gradient_checkpointing_func"
"""Where transformers' layers have the function that computes them again in the backward pass."""


def routers_of(model: Any) -> list[Any]:
    """The model's routers, from the first layer on. Raises a `FeatureUnavailableError` if it has none of this kind."""
    found = [module for module in model.modules() if type(module).__name__.endswith(ROUTER)]
    if not found:
        raise FeatureUnavailableError(
            f"{KEY}: {type(model).__name__} has no router that chooses experts in one module: leave the key out"
        )
    return found


@contextmanager
def noting(routers: list[Any]) -> Iterator[list[Tensor]]:
    """Inside, each router that is run adds the experts that it chooses, [T, K], to the list."""
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _router, _given, made: chosen.append(made[-1])) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


class Followed(TorchFunctionMode):
    """Inside it, `torch.topk` of K finds the experts that are given, with the scores that they have here."""

    def __init__(self, experts_TK: Tensor) -> None:
        super().__init__()
        self._experts_TK = experts_TK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._experts_TK.shape:
            return found
        experts_TK = torch.where(self._experts_TK < 0, found.indices, self._experts_TK)
        return torch.return_types.topk((args[0].gather(-1, experts_TK), experts_TK))


@contextmanager
def following(model: Any) -> Iterator[None]:
    """Inside (forward *and* backward), the model takes routes as an argument and follows them.

    A layer gets them with its other arguments, so a layer that is computed again in the backward pass gets its own.
    """
    causal = causal_model(model)
    routers = routers_of(causal)
    number = {id(router): index for index, router in enumerate(routers)}
    with ExitStack() as stack:
        layers = causal.base_model.layers
        for depth, layer in enumerate(layers):
            for router in (module for module in layer.modules() if id(module) in number):
                here: list[Tensor | None] = [None]
                enter = partial(_enter, here, {len(layers): depth, len(routers): number[id(router)]})
                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                if (again := layer.__dict__.get(CHECKPOINTS)) is not None:
                    layer.__dict__[CHECKPOINTS] = partial(_recompute, here, again)
                    stack.callback(layer.__dict__.__setitem__, CHECKPOINTS, again)
                stack.enter_context(replaced(router, partial(_follow, here, router.forward)))
        yield


def _enter(here: list[Tensor | None], places: dict[int, int], _layer: Any, given: Any, named: dict[str, Any]) -> Any:
    """A layer begins: keep its router's routes, [T, K], and let nothing else see them. `places`: L → its own l."""
    routes_BNLK = named.pop(ARGUMENT, None)
    if routes_BNLK is None:
        here[0] = None
    elif (noted := routes_BNLK.shape[2]) in places:
        here[0] = routes_BNLK[:, :, places[noted]].flatten(0, 1)
    else:
        raise EngineError(f"{KEY}: the engine noted the experts of {noted} layers, and the model has {max(places)}")
    return given, named


def _recompute(here: list[Tensor | None], checkpoint: Any, call: Any, *given: Any) -> Any:
    """A layer is computed now and again in the backward pass, perhaps after others' turn: newer versions of
    transformers run no hook then, so `_enter` doesn't hear of it."""
    routes_TK = here[0]

    def own(*given: Any) -> Any:
        here[0] = routes_TK
        return call(*given)

    return checkpoint(own, *given)


def _follow(here: list[Tensor | None], own: Any, *given: Any, **named: Any) -> Any:
    experts_TK = here[0]
    if experts_TK is None:
        return own(*given, **named)
    with Followed(experts_TK):
        return own(*given, **named)
