"""How a batch is laid out: of the layouts that the model computes rightly, the one that should be fastest.

`plan(...)` estimates each layout's time from measured costs: tokens through the layers, pairs of attention, the fixed
cost of a block. Sharing pays unless it saves so few tokens that the extra blocks cost more. Whether a model can compute
trees is found out in `tree_check`; `rows_for(model)` says whether its rows may hold several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ajet.attention_rules import length_dependent_rope
from ajet.four_bits import numbers_in
from ajet.trainer.forward import padded_tokens, row_batches
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
        weights = max(sum(map(numbers_in, model.parameters())) - embedding, 1)
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


def rows_for(model: Any) -> Layout:
    """The rows in which this model computes a token as it did when it was sampled.

    If the rotary embedding depends on the length of a row, a later call in the same row would change earlier ones.
    """
    return Layout.MERGED if length_dependent_rope(model) is None else Layout.FLAT


def plan(items: Sequence[Item], costs: CostModel, budget: int | None, layouts: Sequence[Layout]) -> list[Pack]:
    """The packs in whichever of these layouts should be fastest."""
    candidates = [make_packs(items, layout, budget) for layout in layouts]
    return min(candidates, key=lambda packs: costs.estimate(packs, budget or 1 << 30))
