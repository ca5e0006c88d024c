"""How a batch is laid out: as trees or as merged rows, whichever should be faster, if the model can do both.

`plan(...)` estimates each layout's time from measured costs: tokens through the layers, pairs of attention, the fixed
cost of a block. Sharing pays unless it saves so few tokens that the extra blocks cost more. `tree_support(model)` and
`check_trees(...)` find out whether the model computes trees correctly. A model that doesn't is trained in rows: that is
slower but never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ajet.trainer.attention import UnsupportedAttentionError
from ajet.trainer.forward import Forward, PackForward, RowForward, padded_tokens, row_batches
from ajet.trainer.pack import Item, Layout, Pack, make_packs


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a pack's forward and backward pass: seconds, up to a common factor."""

    token: float
    """One token through all layers."""
    pair: float
    """One query-key pair in all layers."""
    block: float
    """One attention block in all layers, on top of its pairs."""
    batch: float = 0.0
    """One batch of rows, on top of its tokens."""

    @classmethod
    def of(cls, model: Any) -> CostModel:
        """The model's costs in floating point operations; fixed costs as the operations that would take as long."""
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        embedding = config.vocab_size * config.hidden_size
        weights = max(sum(parameter.numel() for parameter in model.parameters()) - embedding, 1)
        # forward + backward: 6 per weight, 14 per pair and channel; attention runs at half the layers' speed (measured)
        pair = 2.0 * 14.0 * layers * config.num_attention_heads * head_size
        return cls(token=6.0 * weights, pair=pair, block=BLOCK_OPERATIONS * layers, batch=BATCH_OPERATIONS * layers)

    def estimate(self, packs: Sequence[Pack], budget: int = 1 << 30) -> float:
        """The cost of all packs: trees as one sequence, others as padded rows."""
        total = 0.0
        for pack in packs:
            if pack.layout is not Layout.TREE:
                lengths = [end - start for start, end in pack.rows]
                total += padded_tokens(pack, budget) * self.token
                total += sum(length**2 / 2 for length in lengths) * self.pair
                total += len(row_batches(pack, budget)) * self.batch
                continue
            blocks = pack.blocks
            pairs = sum((end - start) ** 2 / 2 for start, end in blocks.causal)
            pairs += sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in blocks.full)
            total += (len(pack) * self.token + pairs * self.pair) * PACK_OVERHEAD
            total += (len(blocks.causal) + len(blocks.full)) * self.block
        return total


BLOCK_OPERATIONS = 2.0e6
"""Fixed cost of a block in one layer, forward and backward (about 80 µs at 25 GFLOP/s, measured on one CPU core)."""

PACK_OVERHEAD = 1.1
"""A tree's tokens cost a little more than those of padded rows: its rows are gathered and joined (measured)."""

BATCH_OPERATIONS = 5.0e6
"""Fixed cost of a batch of rows in one layer, forward and backward."""


def plan(items: Sequence[Item], costs: CostModel, budget: int | None, *, trees: bool = True) -> list[Pack]:
    """The packs in the layout that should be fastest. `trees=False`: only layouts that every model can run."""
    layouts = [Layout.TREE, Layout.MERGED] if trees else [Layout.MERGED]
    candidates = [make_packs(items, layout, budget) for layout in layouts]
    return min(candidates, key=lambda packs: costs.estimate(packs, budget or 1 << 30))


log = logging.getLogger("ajet.trainer")

RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "gated_delta", "hybrid")
"""Layer types in transformers' `config.layer_types` that carry a state from token to token."""

CHECK_TOKENS = 2048
"""Size of the comparison, in tokens of flat rows."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest accepted difference of logprobs (absolute) and of the gradient (relative to its norm).

A wrong mask causes a far larger difference, rounding in long rows a far smaller one.
"""


def tree_support(model: Any) -> str | None:
    """Why this model can't compute packed trees, judging by its configuration; None if it may be able to."""
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


def check_trees(model: Any, items: Sequence[Item]) -> str | None:
    """Run some of the calls as a tree and as flat rows, forward and backward: what differs, or None."""
    chosen: list[Item] = []
    tokens = 0
    for item in items:
        if chosen and tokens + item.row_tokens > CHECK_TOKENS:
            break
        chosen.append(item)
        tokens += item.row_tokens
    try:
        tree, tree_gradient = _run(model, PackForward(), make_packs(chosen, Layout.TREE))
    except (UnsupportedAttentionError, TypeError) as error:  # TypeError: forward doesn't take our keyword
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
