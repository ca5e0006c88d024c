"""What a model does after its last layer, for some positions at a time: in chunks, or by Liger's fused kernel.

A matrix of all tokens by the whole vocabulary is often larger than the model. `HiddenStates` keeps what the last layer
gave and computes the logits of any positions from it, through the model's own forward pass: no code per model.

Shapes: B rows, N tokens of a row, W width of the model, S selected positions, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.schema.install import install_command

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


KEY = "ajet.trainer_common.logits_kernel"
AFTER_THE_PROJECTION = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of configurations whose models change the logits that the output layer gives."""


def require_liger(device: str) -> None:
    """Raise unless the kernel can run on a device of this kind (`cpu` or `cuda`)."""
    _function()
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{KEY}: liger needs a CUDA GPU, and this run trains on the {device.upper()}: set it to chunks, which "
            "computes the same, or leave it out"
        )


def why_not_liger(model: Any) -> str | None:
    """What the kernel doesn't know about this model; None if it knows everything."""
    causal = causal_model(model)
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output layer is a {type(head).__name__}"
    text = causal.config.get_text_config()
    changed = [key for key in AFTER_THE_PROJECTION if getattr(text, key, None) not in (None, 1.0)]
    return f"its logits are changed after the projection ({', '.join(changed)})" if changed else None


def fused_logprobs(model: Any, states_EW: Tensor, target_E: Tensor, temperature_E: Tensor | None) -> Tensor:
    """log_softmax(logits / temperature)[target] of every edge, from what the last layer gave."""
    head = causal_model(model).get_output_embeddings()
    if temperature_E is not None:  # without a bias, dividing before the projection is dividing after it
        if head.bias is not None:
            raise ValueError("its output layer has a bias, which no temperature may divide")
        states_EW = states_EW / temperature_E[:, None].to(states_EW.dtype)
    loss_E: Tensor = _function()(states_EW.contiguous(), head.weight, target_E, bias=head.bias, reduction="none")
    return -loss_E


def _function() -> Any:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise MissingDependencyError(
            f"{KEY}: liger needs liger-kernel ({error}): {install_command('liger')}"
        ) from error
    return liger_fused_linear_cross_entropy
