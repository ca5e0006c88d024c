"""Chooses how a batch is laid out: shared as a tree, as merged rows, or as flat rows, whichever should be fastest.

An estimate from three measured costs: tokens through the layers, pairs of attention, and the fixed cost of a block.
Sharing pays unless it saves so few tokens that the extra blocks cost more (`benchmarks/tree_training.py` measures it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ajet.trainer.pack import Item, Layout, Pack, make_packs
from ajet.trainer.rows import padded_tokens, row_batches


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of forward and backward for one pack, up to a common factor."""

    token: float
    """One token through all layers."""
    pair: float
    """One query-key pair in all layers."""
    block: float
    """One attention block in all layers, besides its pairs."""
    batch: float = 0.0
    """One batch of rows, besides its tokens."""

    @classmethod
    def of(cls, model: Any) -> CostModel:
        """Floating point operations of this model; blocks as the operations that fit into their fixed cost."""
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        embedding = config.vocab_size * config.hidden_size
        weights = max(sum(parameter.numel() for parameter in model.parameters()) - embedding, 1)
        # forward + backward: 6 per weight, 14 per pair and channel; measured, attention runs at half the layers' speed
        pair = 2.0 * 14.0 * layers * config.num_attention_heads * head_size
        return cls(token=6.0 * weights, pair=pair, block=BLOCK_OPERATIONS * layers, batch=BATCH_OPERATIONS * layers)

    def estimate(self, packs: Sequence[Pack], budget: int = 1 << 30) -> float:
        """The cost of all packs: a tree's as one sequence, others' as padded rows."""
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
"""Fixed cost of one block in one layer, forward and backward (about 80 µs at 25 GFLOP/s, measured on one CPU core)."""

PACK_OVERHEAD = 1.1
"""A pack's tokens cost a little more than those of padded rows: its rows are gathered and joined (measured)."""

BATCH_OPERATIONS = 5.0e6
"""Fixed cost of one batch of rows in one layer: a forward and backward pass of its own."""


def plan(items: Sequence[Item], costs: CostModel, budget: int | None, *, trees: bool = True) -> list[Pack]:
    """The packs of the layout that should be fastest. `trees=False`: only layouts that every model can run."""
    layouts = [Layout.TREE, Layout.MERGED] if trees else [Layout.MERGED]
    candidates = [make_packs(items, layout, budget) for layout in layouts]
    return min(candidates, key=lambda packs: costs.estimate(packs, budget or 1 << 30))
