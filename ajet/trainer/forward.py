"""Computes the logprobs of a pack's edges. Only this module runs the model.

Two executors give the same result: `PackForward` computes the pack as one sequence (see `attention`), `RowForward` cuts
a pack without sharing into ordinary padded rows. `BestForward` takes the one that fits the pack's layout. Logits are
computed only where an edge needs them, and if there are many of them, chunk by chunk: the backward pass then computes
them again, so that those of a whole pack never exist together.

Shapes: E edges, P positions with logits, V vocabulary, B rows of a batch, N tokens of a row, W width of the model.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ajet.engine.attention_rules import forget_lengths, length_dependent_rope
from ajet.trainer.attention import pack_arguments, plan_attention, tree_attention
from ajet.trainer.output_head import HiddenStates, chunk_positions, fused_logprobs, in_chunks, vocabulary_of
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

    chunk: int | None = None
    """Most positions whose logits exist at a time. None: depends on the vocabulary. 0: no limit."""
    liger: bool = False
    """Whether Liger's kernel computes the logprobs, without entropy."""

    def session(self, model: Any) -> Any:
        return tree_attention(model)

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        arguments = pack_arguments(pack, plan_attention(pack, _device(model)))
        if self.liger:
            return run_fused(model, arguments, None, pack.edges)
        return run_edges(model, arguments, None, pack.edges, entropy, _chunk(model, pack, self.chunk))


@dataclass(frozen=True, slots=True)
class BestForward:
    """Trees as one sequence, packs without sharing as rows."""

    budget: int = 16384
    chunk: int | None = None
    liger: bool = False

    def session(self, model: Any) -> Any:
        return tree_attention(model)

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        tree = pack.layout is Layout.TREE
        executor: Forward = (
            PackForward(self.chunk, self.liger) if tree else RowForward(self.budget, self.chunk, self.liger)
        )
        return executor(model, pack, entropy=entropy)


@dataclass(frozen=True, slots=True)
class RowForward:
    """Padded batches of ordinary rows with the model's own attention, for packs without sharing."""

    budget: int = 16384
    """Tokens of a padded batch."""
    chunk: int | None = None
    liger: bool = False

    def session(self, model: Any) -> Any:
        return nullcontext()

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        device = _device(model)
        rows = pack.rows
        row_starts = np.array([start for start, _ in rows])
        edge_row = np.searchsorted(row_starts, pack.edges.position, side="right") - 1
        chunk = _chunk(model, pack, self.chunk)
        parts, order = [], []
        alone = length_dependent_rope(model) is not None  # together, rows would change each other's positions
        for batch in row_batches(pack, 1 if alone else self.budget):
            if alone:
                forget_lengths(model)
            edges = np.flatnonzero(np.isin(edge_row, batch))
            line = {row: index for index, row in enumerate(batch)}
            lines = np.array([line[int(row)] for row in edge_row[edges]])
            columns = pack.edges.position[edges] - row_starts[edge_row[edges]]
            ids = _padded(pack, [rows[row] for row in batch])
            arguments = {"input_ids": torch.from_numpy(ids).to(device), "use_cache": False}
            chosen = _select(pack.edges, edges, columns)
            if self.liger:
                parts.append(run_fused(model, arguments, lines, chosen))
            else:
                parts.append(run_edges(model, arguments, lines, chosen, entropy, chunk))
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


def _padded(pack: Pack, rows: list[tuple[int, int]]) -> np.ndarray:
    """The ids of a right-padded batch. Causal models never see the padding."""
    longest = max(end - start for start, end in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    for line, (start, end) in enumerate(rows):
        ids[line, : end - start] = pack.ids[start:end]
    return ids


def _select(edges: Edges, chosen: np.ndarray, position: np.ndarray) -> Edges:
    """Some edges, at other positions, and without their entries."""
    names = ("target", "temperature", "sampler_logprob", "episode", "call", "token", "trajectory")
    empty = np.zeros(0)
    return Edges(
        position=position,
        **{name: getattr(edges, name)[chosen] for name in names},
        entry_edge=empty.astype(np.int64),
        entry_advantage=empty,
        entry_weight=empty,
    )


def _chunk(model: Any, pack: Pack, asked: int | None) -> int | None:
    """How many positions get their logits at a time; None if those of the whole pack may exist together."""
    size = chunk_positions(vocabulary_of(model)) if asked is None else asked
    return size if 0 < size < len(pack.edges) else None


def run_edges(
    model: Any,
    arguments: dict[str, Any],
    line_E: np.ndarray | None,
    edges: Edges,
    entropy: Entropy,
    chunk: int | None,
) -> EdgeLogprobs:
    """Run the model, up to what its edges need. `line_E`: the row of each; None: there is one row."""
    device = arguments["input_ids"].device
    targets = _Targets.of(edges, entropy, device)
    hidden = HiddenStates.of(model, arguments) if chunk is not None else None
    if hidden is not None and chunk is not None:
        found = in_chunks(hidden, _states(hidden, line_E, edges), chunk, True, targets.take)
    else:
        places, edge_place = np.unique(edges.position, return_inverse=True)
        keep = torch.from_numpy(places).to(device)
        logits_BPV = model(**arguments, logits_to_keep=keep).logits
        found = targets.take(_at_places(logits_BPV, line_E, edge_place), 0)
    return EdgeLogprobs(found[0], found[1] if len(found) > 1 else None)


def run_fused(model: Any, arguments: dict[str, Any], line_E: np.ndarray | None, edges: Edges) -> EdgeLogprobs:
    """The same by Liger's kernel, without entropy."""
    hidden = HiddenStates.of(model, arguments)
    if hidden is None:
        raise ValueError("the model can't be divided before its output layer")
    targets = _Targets.of(edges, Entropy.NO, arguments["input_ids"].device)
    states_EW = _states(hidden, line_E, edges)
    return EdgeLogprobs(fused_logprobs(model, states_EW, targets.target_E, targets.temperature_E), None)


def _states(hidden: HiddenStates, line_E: np.ndarray | None, edges: Edges) -> Tensor:
    """[E, W] of every edge's position."""
    device = hidden.states_BNW.device
    line: Tensor | int = 0 if line_E is None else torch.from_numpy(line_E).to(device)
    return hidden.states_BNW[line, torch.from_numpy(edges.position).to(device)]


def _at_places(logits_BPV: Tensor, line_E: np.ndarray | None, place_E: np.ndarray) -> Tensor:
    """[E, V], without a copy where every position has one edge, in order."""
    device = logits_BPV.device
    if line_E is not None:
        return logits_BPV[torch.from_numpy(line_E).to(device), torch.from_numpy(place_E).to(device)]
    if np.array_equal(place_E, np.arange(logits_BPV.shape[1])):
        return logits_BPV[0]
    return logits_BPV[0][torch.from_numpy(place_E).to(device)]


@dataclass(frozen=True, slots=True)
class _Targets:
    """What is asked of each edge's logits."""

    target_E: Tensor
    temperature_E: Tensor | None
    entropy: Entropy

    @classmethod
    def of(cls, edges: Edges, entropy: Entropy, device: torch.device) -> _Targets:
        warm = (edges.temperature != 1.0).any()
        temperature_E = torch.from_numpy(edges.temperature).to(device) if warm else None
        return cls(torch.from_numpy(edges.target).to(device), temperature_E, entropy)

    def take(self, logits_EV: Tensor, start: int) -> tuple[Tensor, ...]:
        """log_softmax(logits / T)[target] of the edges from `start` on, and the entropy there if it is asked for."""
        here = slice(start, start + len(logits_EV))
        logits_EV = logits_EV if logits_EV.dtype is torch.float64 else logits_EV.float()
        if self.temperature_E is not None:
            logits_EV = logits_EV / self.temperature_E[here, None].to(logits_EV.dtype)
        log_EV = torch.log_softmax(logits_EV, dim=-1)
        logprob_E = log_EV.gather(1, self.target_E[here, None])[:, 0]
        if self.entropy is Entropy.NO:
            return (logprob_E,)
        if self.entropy is Entropy.VALUE:
            log_EV = log_EV.detach()
        return logprob_E, -(log_EV.exp() * log_EV).sum(dim=-1)


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
