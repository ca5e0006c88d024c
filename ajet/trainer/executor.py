"""Which executor trains this model: chosen once, by comparing on the first batch. What differs is not used, and the log
says why: a slower way is never a wrong one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ajet.engine.attention_rules import length_dependent_rope
from ajet.engine.quantization import numbers_in
from ajet.schema.call_tree import CallTree
from ajet.trainer.compiled import CompiledForward, layers_to_compile
from ajet.trainer.credit.weights import EpisodeCredit
from ajet.trainer.forward import BestForward, Forward, RowForward, padded_tokens, row_batches
from ajet.trainer.output_head import why_not_liger
from ajet.trainer.pack import Item, Layout, Pack, items_of, make_packs
from ajet.trainer.tree_check import check_same, check_trees, tree_support


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


log = logging.getLogger("ajet.trainer")


class Chosen(NamedTuple):
    """How packs are run, and in which layouts."""

    forward: Forward
    layouts: tuple[Layout, ...]


def choose(
    model: Any, items: Sequence[Item], budget: int, chunk: int | None, *, liger: bool = False, compiled: bool = False
) -> Chosen:
    """Trees, unless the model can't compute them or its first trees differ from rows; with Liger's kernel and compiled
    layers, if they are asked for and give the same."""
    why = tree_support(model) or check_trees(model, items)
    if why is not None:
        log.warning("training in rows, without sharing between branches: %s", why)
    plain: BestForward | RowForward = RowForward(budget, chunk) if why is not None else BestForward(budget, chunk)
    layout = Layout.FLAT if why is not None else Layout.TREE
    forward: Forward = plain
    if liger:
        fused = replace(plain, liger=True)
        if (why_not := why_not_liger(model) or check_same(model, items, plain, fused, layout)) is None:
            forward = fused
        else:
            log.warning("training without Liger's kernel: %s", why_not)
    if compiled:
        faster = CompiledForward(forward)
        why_not = None if layers_to_compile(model) else f"{type(model).__name__} doesn't mark its layers"
        if (why_not := why_not or check_same(model, items, forward, faster, layout)) is None:
            forward = faster
        else:
            log.warning("training without compiled layers: %s", why_not)
    rows = rows_for(model)
    return Chosen(forward, (Layout.TREE, rows) if why is None else (rows,))


Logprobs = dict[tuple[int, int], NDArray[np.float64]]


"""Logprobs of calls' trained tokens, by (episode of the batch, call)."""


class ModelTeacher:
    """A Hugging Face causal model."""

    def __init__(self, model: Any, budget: int) -> None:
        self._model = model
        self._costs = CostModel.of(model)
        self._budget = budget
        """Tokens per forward pass."""

    def logprobs(self, batch: Sequence[tuple[CallTree, EpisodeCredit]]) -> Logprobs:
        """Of all trained tokens, each at the temperature of its call."""
        items = items_of(batch)
        forward = RowForward(self._budget)
        known: Logprobs = {}
        with torch.no_grad():
            for pack in plan(items, self._costs, self._budget, [rows_for(self._model)]) if items else []:
                values = forward(self._model, pack).logprob_E.double().cpu().numpy()
                known.update((key, values[where]) for key, where in pack.edges.by_call())
        return known
