"""What a causal model does after its last layer, for some positions at a time: the projection to the vocabulary, and
whatever follows it (a soft cap, a factor).

A matrix of all tokens by the whole vocabulary is often larger than the model. `HiddenStates` keeps what the last layer
gave and computes the logits of any positions from it, through the model's own forward pass: no code per model.

Shapes: B rows, N tokens of a row, W width of the model, S selected positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

LOGITS_BYTES = 256 * 2**20
"""Most that the float32 logits of one chunk take by default: about 440 positions with a vocabulary of 152,000. That is
enough for the projection to be limited by arithmetic, not by reading its weights."""


def chunk_positions(vocabulary: int) -> int:
    """How many positions get their logits at once, unless something else is asked for."""
    return max(1, LOGITS_BYTES // (4 * vocabulary))


def vocabulary_of(model: Any) -> int:
    """How many logits a position has."""
    size: int = causal_model(model).config.get_text_config().vocab_size
    return size


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The output of a model's last layer."""

    states_BNW: Tensor
    _model: Any
    _body: Any
    _output: ModelOutput
    _input_ids: Tensor

    @classmethod
    def of(cls, model: Any, arguments: dict[str, Any]) -> HiddenStates | None:
        """Run the model up to its output layer. None if the model can't be divided there."""
        causal = causal_model(model)
        body = causal.base_model
        if body is causal:
            return None
        found: list[Any] = []
        hook = body.register_forward_hook(lambda _body, _inputs, output: found.append(output))
        try:
            causal(**arguments, logits_to_keep=torch.zeros(1, dtype=torch.long, device=arguments["input_ids"].device))
        finally:
            hook.remove()
        if len(found) != 1 or not isinstance(found[0], ModelOutput) or "last_hidden_state" not in found[0]:
            return None
        return cls(found[0]["last_hidden_state"], causal, body, found[0], arguments["input_ids"])

    def logits(self, states_SW: Tensor) -> Tensor:
        """The logits [S, V] of some of the states."""
        output = type(self._output)(**{**self._output, "last_hidden_state": states_SW[None]})
        with _returning(self._body, output):
            logits_SV: Tensor = self._model(input_ids=self._input_ids, use_cache=False, logits_to_keep=0).logits[0]
        return logits_SV


Take = Callable[[Tensor, int], tuple[Tensor, ...]]
"""From the logits of some positions, and the number of the first of them, to what is wanted of each."""


def in_chunks(hidden: HiddenStates, states_SW: Tensor, size: int, recompute: bool, take: Take) -> tuple[Tensor, ...]:
    """`take` of all positions, from at most `size` at a time. `recompute`: the backward pass computes the logits again
    instead of keeping them."""

    def part(states: Tensor, start: int) -> tuple[Tensor, ...]:
        return take(hidden.logits(states), start)

    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(states_SW), size):
        states = states_SW[start : start + size]
        if recompute and torch.is_grad_enabled():
            parts.append(checkpoint(part, states, start, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(states, start))
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def causal_model(model: Any) -> Any:
    """The model itself, without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _returning(module: Any, output: ModelOutput) -> Iterator[None]:
    """Inside, this module returns `output` whatever it is called with."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *_inputs, **_options: output
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
