"""Whether a model computes packed trees right: what its configuration says, and one comparison with ordinary rows.

`tree_support(model)` looks before anything runs; `compare(...)` runs a small part of the first batch both ways, forward
and backward. A model that fails trains in rows: slower, never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ajet.trainer.attention import UnsupportedAttentionError
from ajet.trainer.forward import Forward, PackForward, RowForward
from ajet.trainer.pack import Item, Layout, Pack, make_packs

log = logging.getLogger("ajet.trainer")

RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "gated_delta", "hybrid")
"""Layer types in transformers' `config.layer_types` that carry a state from token to token."""

CHECK_TOKENS = 2048
"""Size of the comparison, in tokens as flat rows."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest accepted difference of logprobs (absolute) and of the gradient (relative to its norm).

A wrong mask differs by far more, rounding in long rows by far less.
"""


def tree_support(model: Any) -> str | None:
    """Why this model can't take packed trees; None if nothing speaks against it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    recurrent = sorted({kind for kind in layer_types if any(word in str(kind) for word in RECURRENT)})
    if recurrent:
        return f"{type(base).__name__} has layers that carry a state from token to token ({', '.join(recurrent)})"
    if getattr(base, "_is_stateful", False):
        return f"{type(base).__name__} carries a state from token to token"
    if not getattr(base, "_supports_attention_backend", False) or not hasattr(base, "set_attn_implementation"):
        return f"{type(base).__name__} does not use transformers' attention interface"
    return None


def compare(model: Any, items: Sequence[Item]) -> str | None:
    """Run some of the calls as a tree and as flat rows: what differs, or None if they agree."""
    chosen: list[Item] = []
    tokens = 0
    for item in items:
        if chosen and tokens + item.row_tokens > CHECK_TOKENS:
            break
        chosen.append(item)
        tokens += item.row_tokens
    try:
        tree, tree_gradient = _run(model, PackForward(), make_packs(chosen, Layout.TREE))
    except (UnsupportedAttentionError, TypeError) as error:  # TypeError: forward takes no such keyword
        return str(error)
    flat, flat_gradient = _run(model, RowForward(), make_packs(chosen, Layout.FLAT))
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    gap = float((tree - flat).abs().max())
    norm = float(torch.stack([gradient.norm() for gradient in flat_gradient]).norm())
    off = float(torch.stack([(a - b).norm() for a, b in zip(tree_gradient, flat_gradient, strict=True)]).norm())
    if not (gap <= tolerance and off <= tolerance * max(norm, 1e-12)):
        return f"logprobs differ by up to {gap:.2g} and gradients by {off / max(norm, 1e-12):.2g} of their norm"
    return None


def _run(model: Any, forward: Forward, packs: list[Pack]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs, and the gradient of their mean."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with forward.session(model):
        (pack,) = packs
        logprob_E = forward(model, pack).logprob_E
        gradients = torch.autograd.grad(logprob_E.mean(), trained, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
    return logprob_E.detach(), [gradient.float() for gradient in found]
