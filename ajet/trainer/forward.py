"""From a pack to the logprobs of its edges: the one module that runs the model.

Two executors give the same result: `PackForward` computes the pack as one sequence (see `attention`), `RowForward` cuts
a pack without sharing into ordinary padded rows. `BestForward` takes the one that fits the pack's layout. Logits are
computed only where an edge needs them.

Shapes: E edges, P positions with logits, V vocabulary, B rows of a batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ajet.attention_rules import length_dependent_rope
from ajet.trainer.attention import pack_arguments, plan_attention, tree_attention
from ajet.trainer.pack import Edges, Layout, Pack


class EdgeLogprobs(NamedTuple):
    """Logprob and entropy of every edge of a pack, in the order of `pack.edges`."""

    logprob_E: Tensor
    entropy_E: Tensor | None


class Entropy(Enum):
    """Whether to compute the entropy at each edge; its gradient takes as much memory as the logits."""

    NO = 0
    VALUE = 1
    GRADIENT = 2


class Forward(Protocol):
    """Runs packs. Use it inside `session()`, backward pass included."""

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs: ...

    def session(self, model: Any) -> Any:
        """A context manager that prepares the model for this executor."""


@dataclass(frozen=True, slots=True)
class PackForward:
    """Each pack as one sequence."""

    def session(self, model: Any) -> Any:
        return tree_attention(model)

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        device = _device(model)
        plan = plan_attention(pack, device)
        places, edge_place = np.unique(pack.edges.position, return_inverse=True)
        keep = torch.from_numpy(places).to(device)
        logits_PV = model(**pack_arguments(pack, plan), logits_to_keep=keep).logits[0]
        return _at_edges(logits_PV, edge_place, pack.edges, entropy)


@dataclass(frozen=True, slots=True)
class BestForward:
    """Trees as one sequence, packs without sharing as rows."""

    budget: int = 16384

    def session(self, model: Any) -> Any:
        return tree_attention(model)

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        executor: Forward = PackForward() if pack.layout is Layout.TREE else RowForward(self.budget)
        return executor(model, pack, entropy=entropy)


@dataclass(frozen=True, slots=True)
class RowForward:
    """Padded batches of ordinary rows with the model's own attention, for packs without sharing."""

    budget: int = 16384
    """Tokens of a padded batch."""

    def session(self, model: Any) -> Any:
        return nullcontext()

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        device = _device(model)
        rows = pack.rows
        row_starts = np.array([start for start, _ in rows])
        edge_row = np.searchsorted(row_starts, pack.edges.position, side="right") - 1
        parts, order = [], []
        alone = length_dependent_rope(model) is not None  # together, rows would change each other's positions
        for batch in row_batches(pack, 1 if alone else self.budget):
            edges = np.flatnonzero(np.isin(edge_row, batch))
            line = {row: index for index, row in enumerate(batch)}
            lines = np.array([line[int(row)] for row in edge_row[edges]])
            columns = pack.edges.position[edges] - row_starts[edge_row[edges]]
            logits_BPV, places = _padded(model, pack, [rows[row] for row in batch], columns, device)
            column_place = np.searchsorted(places, columns)
            logits_EV = logits_BPV[torch.from_numpy(lines).to(device), torch.from_numpy(column_place).to(device)]
            parts.append(_at_edges(logits_EV, None, _select(pack.edges, edges), entropy))
            order.append(edges)
        back = torch.from_numpy(np.argsort(np.concatenate(order), kind="stable")).to(device)
        logprob_E = torch.cat([part.logprob_E for part in parts])[back]
        entropies = [part.entropy_E for part in parts if part.entropy_E is not None]
        return EdgeLogprobs(logprob_E, torch.cat(entropies)[back] if entropies else None)


SPREAD = 1.2
"""A batch's longest row is at most this many times as long as its shortest, to limit padding."""

SHORT = 32
"""Rows up to this length share batches whatever their lengths: another batch would cost more than the padding."""


def row_batches(pack: Pack, budget: int) -> list[list[int]]:
    """Indices in `pack.rows`, batched by length: each batch is within the budget of padded tokens, or a single row."""
    lengths = [end - start for start, end in pack.rows]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[row]
        fits = (
            batches
            and (len(batches[-1]) + 1) * length <= budget
            and length <= max(SPREAD * lengths[batches[-1][0]], SHORT)
        )
        if fits:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded_tokens(pack: Pack, budget: int) -> int:
    """Tokens to compute, padding included."""
    lengths = [end - start for start, end in pack.rows]
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in row_batches(pack, budget))


def _padded(
    model: Any, pack: Pack, rows: list[tuple[int, int]], columns: np.ndarray, device: torch.device
) -> tuple[Tensor, np.ndarray]:
    """Logits of a right-padded batch at the columns that any row needs. Causal models never see the padding."""
    longest = max(end - start for start, end in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    for line, (start, end) in enumerate(rows):
        ids[line, : end - start] = pack.ids[start:end]
    places = np.unique(columns)
    output = model(
        input_ids=torch.from_numpy(ids).to(device),
        use_cache=False,
        logits_to_keep=torch.from_numpy(places).to(device),
    )
    return output.logits, places


def _select(edges: Edges, chosen: np.ndarray) -> Edges:
    """Some edges, without their entries."""
    names = ("position", "target", "temperature", "sampler_logprob", "episode", "call", "token", "trajectory")
    empty = np.zeros(0)
    return Edges(
        **{name: getattr(edges, name)[chosen] for name in names},
        entry_edge=empty.astype(np.int64),
        entry_advantage=empty,
        entry_weight=empty,
    )


def _at_edges(logits_PV: Tensor, edge_place: np.ndarray | None, edges: Edges, entropy: Entropy) -> EdgeLogprobs:
    """log_softmax(logits / T)[target] of each edge, and the entropy there."""
    device = logits_PV.device
    if edge_place is not None and not np.array_equal(edge_place, np.arange(len(logits_PV))):
        logits_PV = logits_PV[torch.from_numpy(edge_place).to(device)]
    logits_EV = logits_PV if logits_PV.dtype is torch.float64 else logits_PV.float()
    if (edges.temperature != 1.0).any():
        logits_EV = logits_EV / torch.from_numpy(edges.temperature).to(device, logits_EV.dtype)[:, None]
    target_E = torch.from_numpy(edges.target).to(device)
    log_EV = torch.log_softmax(logits_EV, dim=-1)
    logprob_E = log_EV.gather(1, target_E[:, None])[:, 0]
    if entropy is Entropy.NO:
        return EdgeLogprobs(logprob_E, None)
    if entropy is Entropy.VALUE:
        log_EV = log_EV.detach()
    return EdgeLogprobs(logprob_E, -(log_EV.exp() * log_EV).sum(dim=-1))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
