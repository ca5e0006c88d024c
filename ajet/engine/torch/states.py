"""Layers that keep a state from token to token: linear attention, Mamba, short convolutions.

A *mixer* is the module of such a layer that reads its state from transformers' cache and writes it back. While the
engine serves, a mixer runs once for all sequences with one new token, and once for each longer chunk, on the states of
just these sequences (`mixing`). Each sequence has its states beside its keys and values, by the position that they
belong to. A state is never changed in place: a step makes new ones, so keeping one costs its memory and nothing else.

Shapes: T tokens of a step, B sequences of a call, W width of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ajet.engine.attention_rules import PROBE_TOKENS, UnsupportedAttentionError, probing
from ajet.engine.layers import replaced
from ajet.engine.torch.kv_cache import LayerState
from ajet.engine.torch.readers import Member

CACHES = ("cache_params", "past_key_values")
"""How mixers name the cache that they are given."""


class LayerCache:
    """What a mixer takes for transformers' cache: the states of one layer. It does what `LinearAttentionLayer` does."""

    def __init__(self, state: LayerState | None = None) -> None:
        self.state = LayerState() if state is None else state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.tensors.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Returns what the convolution runs over: what it saw before, and the new."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            full = torch.nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            full = torch.cat([before, conv_states], dim=-1)
        self.state.tensors["conv", state_idx] = full[..., -size:].clone()
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        before = self.get_recurrent_state(layer_idx, state_idx)
        new = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.state.tensors["recurrent", state_idx] = new
        return new


class Mixer(NamedTuple):
    """A module with a state."""

    module: Any
    layer: int
    cache: str
    """The parameter that takes the cache."""
    state_bytes: int
    """The bytes of one sequence's state."""
    by_token: bool = False
    """Whether it forgets its state in a call of several tokens, as the scans of Mamba 1 do in transformers."""


def _cache_parameter(module: Any) -> str | None:
    """The parameter by which a module with a state takes the cache; None if it is no such module."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return None
    taken = inspect.signature(module.forward).parameters
    found = next((name for name in CACHES if name in taken), None)
    convolves = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    return found if found == CACHES[0] or convolves else None


def mixers_of(model: Any) -> list[Mixer]:
    """All mixers in the order they run, found by giving each a cache and seeing whether it leaves a state there."""
    candidates = {module: name for module in model.modules() if (name := _cache_parameter(module)) is not None}
    if not candidates:
        return []
    found: list[Mixer] = []

    def watched(module: Any, own: Any, *inputs: Any, **options: Any) -> Any:
        cache = LayerCache()
        output = own(*inputs, **{**options, candidates[module]: cache})
        if cache.state.tensors:
            found.append(Mixer(module, int(module.layer_idx), candidates[module], cache.state.bytes))
        return output

    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    with ExitStack() as stack, probing(model):
        for module in candidates:
            stack.enter_context(replaced(module, partial(watched, module, module.forward)))
        model(input_ids=tokens, use_cache=False, ajet_layers=[])
    if len({id(mixer.module) for mixer in found}) < len(found):
        raise UnsupportedAttentionError("several layers share one module that keeps a state")
    return found


def goes_on(mixer: Mixer, model: Any) -> bool:
    """Whether what a mixer makes of several tokens depends on what its recurrence held before."""
    weight = next(mixer.module.parameters())
    width = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    hidden_BTW = torch.randn(1, 4, width, generator=generator).to(weight.device, weight.dtype)

    def computed(held: float) -> tuple[Tensor, bool]:
        cache = LayerCache()
        mixer.module(hidden_BTW, **{mixer.cache: cache})
        recurrent = [state for (kind, _), state in cache.state.tensors.items() if kind == "recurrent"]
        for state in recurrent:
            state.fill_(held)
        output: Tensor = mixer.module(hidden_BTW, **{mixer.cache: cache})
        return output, bool(recurrent)

    with torch.inference_mode():
        (one, recurs), (other, _) = computed(0.0), computed(1.0)
    return not recurs or not torch.equal(one, other)


class StepStates:
    """The states that a step starts from, and those that it makes."""

    def __init__(self, members: list[Member], *, apart: bool) -> None:
        rows = [one for one in members if one.part.count == 1 and one.part.context]
        others = [one for one in members if one.part.count > 1 or not one.part.context]
        self._calls = [[one] for one in ([*rows, *others] if apart else others)]
        if rows and not apart:
            self._calls.insert(0, rows)
        self._made: dict[int, list[LayerState]] = {one.start: [] for one in members}
        self._members = members

    def mix(self, own: Callable[..., Tensor], mixer: Mixer, index: int, *inputs: Any, **options: Any) -> Tensor:
        """What a mixer makes of the step's row. It needs neither a mask nor positions: each call is one sequence, or
        one token of several."""
        hidden_1TW: Tensor = options["hidden_states"] if "hidden_states" in options else inputs[0]
        output_1TW = torch.zeros_like(hidden_1TW)
        for call in self._calls:
            size = call[0].part.count
            where = [token for one in call for token in range(one.start, one.start + size)]
            before = [one.part.kv.states[one.part.context][index] for one in call if one.part.context]
            cache = LayerCache(LayerState.together(before) if before else None)
            hidden_BTW = hidden_1TW[0, where].view(len(call), size, -1)
            parts = torch.split(hidden_BTW, 1 if mixer.by_token and before else size, dim=1)
            made_BTW = torch.cat([own(part, **{mixer.cache: cache}) for part in parts], dim=1)
            output_1TW[0, where] = made_BTW.reshape(len(where), -1).to(output_1TW.dtype)
            for row, one in enumerate(call):
                self._made[one.start].append(cache.state.of(row))
        return output_1TW

    def keep(self) -> None:
        """The step is computed: give each sequence its new states."""
        for one in self._members:
            one.part.kv.take_states(one.part.context, one.part.end, self._made[one.start])


@contextmanager
def mixing(mixers: Sequence[Mixer], states: StepStates) -> Iterator[None]:
    """Inside, mixers compute for the engine."""
    with ExitStack() as stack:
        for index, mixer in enumerate(mixers):
            stack.enter_context(replaced(mixer.module, partial(states.mix, mixer.module.forward, mixer, index)))
        yield
    if mixers:
        states.keep()
