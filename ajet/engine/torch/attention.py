"""Attention over the engine's own keys and values, under transformers' public attention interface.

All tokens of a step, of all sequences, go through the model as one row. Each attention layer hands us queries, keys and
values; the step's `Layout` knows which tokens belong to which sequence, stores the new keys and values there, and
attends within each. A sequence with one new token (a reply being drawn) is a *row*, one with more is a *chunk*.

Shapes: T tokens of the step, H query heads, K key/value heads, G = H / K query heads a key/value head, D head size,
N tokens of a chunk, C tokens of its context and itself, R rows, S places of a shelf.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ajet.engine.torch.kv import KV

NAME = "ajet_engine"

CALL_TOKENS = 128
"""A call of its own costs a row about as much as reading so many more tokens (measured on a CPU: 100 to 200)."""


@dataclass(slots=True)
class Part:
    """The new tokens of one sequence in a step: `count` of them after `context` computed ones."""

    kv: KV
    context: int
    count: int

    @property
    def end(self) -> int:
        return self.context + self.count


@dataclass(slots=True)
class Chunk:
    """A part with several tokens, from `start` on in the step's row."""

    part: Part
    start: int
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """By window: every layer of a kind uses the same."""

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which of C each of N may see; None where plain causality within the chunk says it all."""
        part = self.part
        if part.context == 0 and (window is None or part.count <= window):
            return None
        if window not in self.masks:
            query_N1 = torch.arange(part.context, part.end, device=device)[:, None]
            key_1C = torch.arange(part.end, device=device)[None]
            visible = key_1C <= query_N1
            self.masks[window] = visible if window is None else visible & (key_1C > query_N1 - window)
        return self.masks[window]


class Layout:
    """Where the tokens of one step belong: first the rows, one token each, then the chunks.

    Rows that lie close together on a shelf are read with one call (`Neighbours`), the others one by one (`Single`).
    With `apart`, all are: what a row reads is then computed alike whoever else is in the step.
    """

    def __init__(self, rows: list[Part], chunks: list[Part], *, apart: bool = False) -> None:
        self.rows = len(rows)
        self.neighbours: list[Neighbours] = []
        single: list[tuple[int, Part]] = []
        for members in _by_shelf(rows):
            if not apart and _worth_one_call(members):
                self.neighbours.append(Neighbours(members))
            else:
                single += members
        self.singles = Singles(single) if single else None
        self.chunks: list[Chunk] = []
        start = self.rows
        for part in chunks:
            self.chunks.append(Chunk(part, start))
            start += part.count

    def attend(
        self,
        layer: int,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values, and return what each token read, as (1, T, H, D)."""
        heads, tokens = query_1HTD.shape[1:3]
        output_1THD = query_1HTD.new_zeros(1, tokens, heads, value_1KTD.shape[-1])
        if self.rows:
            new = _NewRows.of(query_1HTD, key_1KTD, value_1KTD, self.rows)
            output_RKGD = output_1THD[0, : self.rows].view(*new.query_RKGD.shape[:3], -1)
            for readers in (*self.neighbours, self.singles):
                if readers is not None:
                    output_RKGD[readers.rows_R] = readers.read(layer, new, scaling, window)
        for chunk in self.chunks:
            span = slice(chunk.start, chunk.start + chunk.part.count)
            output_1THD[:, span] = _attend_chunk(
                chunk, layer, query_1HTD[:, :, span], key_1KTD[:, :, span], value_1KTD[:, :, span], scaling, window
            )
        return output_1THD


def _by_shelf(rows: list[Part]) -> list[list[tuple[int, Part]]]:
    """The rows of each shelf with their numbers, in the order of their places."""
    shelves: dict[int, list[tuple[int, Part]]] = {}
    for row, part in enumerate(rows):
        shelves.setdefault(id(part.kv.shelf), []).append((row, part))
    return [sorted(members, key=lambda member: member[1].kv.place) for members in shelves.values()]


def _worth_one_call(members: list[tuple[int, Part]]) -> bool:
    """One call reads all places from its first row to its last, each as far as the longest row goes."""
    span = members[-1][1].kv.place - members[0][1].kv.place + 1
    ends = [part.end for _, part in members]
    return len(members) > 1 and span * max(ends) - sum(ends) <= CALL_TOKENS * len(members)


class _NewRows(NamedTuple):
    """What the rows of a step bring to one layer."""

    query_RKGD: torch.Tensor
    """The query heads that share a key/value head stand as its queries: keys and values are read once, not repeated."""
    key_RKD: torch.Tensor
    value_RKD: torch.Tensor

    @classmethod
    def of(cls, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, rows: int) -> _NewRows:
        groups = key_1KTD.shape[1]
        query_RHD = query_1HTD[0, :, :rows].transpose(0, 1)
        query_RKGD = query_RHD.reshape(rows, groups, query_RHD.shape[1] // groups, -1)
        return cls(query_RKGD, key_1KTD[0, :, :rows].transpose(0, 1), value_1KTD[0, :, :rows].transpose(0, 1))


class Neighbours:
    """Rows of one shelf, read with one masked call over the places from the first to the last of them."""

    def __init__(self, members: list[tuple[int, Part]]) -> None:
        shelf = members[0][1].kv.shelf
        device = shelf.keys_LSHCD.device
        first = members[0][1].kv.place
        self.rows_R = torch.tensor([row for row, _ in members], device=device)
        self.places_R = torch.tensor([part.kv.place - first for _, part in members], device=device)
        self.contexts_R = torch.tensor([part.context for _, part in members], device=device)
        self.span = members[-1][1].kv.place - first + 1
        longest = max(part.end for _, part in members)
        places = slice(first, first + self.span)
        self.keys = shelf.keys_LSHCD[:, places, :, :longest].unbind(0)
        self.values = shelf.values_LSHCD[:, places, :, :longest].unbind(0)
        self.masks: dict[int | None, torch.Tensor] = {}

    def read(self, layer: int, new: _NewRows, scaling: float | None, window: int | None) -> torch.Tensor:
        """Store what is new, and attend."""
        keys_SKCD, values_SKCD = self.keys[layer], self.values[layer]
        keys_SKCD[self.places_R, :, self.contexts_R] = new.key_RKD[self.rows_R]
        values_SKCD[self.places_R, :, self.contexts_R] = new.value_RKD[self.rows_R]
        query_SKGD = new.query_RKGD.new_zeros(self.span, *new.query_RKGD.shape[1:])
        query_SKGD[self.places_R] = new.query_RKGD[self.rows_R]
        mask = self._mask(window, query_SKGD)
        read_SKGD = scaled_dot_product_attention(query_SKGD, keys_SKCD, values_SKCD, attn_mask=mask, scale=scaling)
        return read_SKGD[self.places_R]

    def _mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Added to the scores; of places between the rows, whose results are thrown away, all is visible."""
        if window not in self.masks:
            key_1C = torch.arange(self.keys[0].shape[2], device=query.device)[None]
            hidden_RC = key_1C > self.contexts_R[:, None]
            if window is not None:
                hidden_RC |= key_1C <= self.contexts_R[:, None] - window
            mask_SC = query.new_zeros(self.span, key_1C.shape[1])
            mask_SC[self.places_R] = query.new_zeros(hidden_RC.shape).masked_fill_(hidden_RC, float("-inf"))
            self.masks[window] = mask_SC[:, None, None]
        return self.masks[window]


class Singles:
    """Rows that are read one by one."""

    def __init__(self, members: list[tuple[int, Part]]) -> None:
        parts = [part for _, part in members]
        self.rows_R = torch.tensor([row for row, _ in members], device=parts[0].kv.keys_LHCD.device)
        # By layer, then row. `unbind` makes the views of all layers at once: slicing them one by one costs more than
        # attention itself when the model is small.
        self.keys = _by_layer([part.kv.keys_LHCD[:, None, :, : part.end].unbind(0) for part in parts])
        self.values = _by_layer([part.kv.values_LHCD[:, None, :, : part.end].unbind(0) for part in parts])
        self.new_keys = _by_layer([part.kv.keys_LHCD[:, :, part.context].unbind(0) for part in parts])
        self.new_values = _by_layer([part.kv.values_LHCD[:, :, part.context].unbind(0) for part in parts])

    def read(self, layer: int, new: _NewRows, scaling: float | None, window: int | None) -> torch.Tensor:
        """Store what is new, and attend."""
        torch._foreach_copy_(self.new_keys[layer], new.key_RKD[self.rows_R].unbind(0))
        torch._foreach_copy_(self.new_values[layer], new.value_RKD[self.rows_R].unbind(0))
        queries = new.query_RKGD[self.rows_R][:, None].unbind(0)
        read = []
        for query_1KGD, keys_1KCD, values_1KCD in zip(queries, self.keys[layer], self.values[layer], strict=True):
            keys, values = keys_1KCD, values_1KCD
            if window is not None and keys.shape[2] > window:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            read.append(scaled_dot_product_attention(query_1KGD, keys, values, scale=scaling))
        return torch.cat(read)


def _by_layer(rows: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    return [list(layer) for layer in zip(*rows, strict=True)]


def _attend_chunk(
    chunk: Chunk,
    layer: int,
    query_1HND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    part = chunk.part
    keys_KCD = part.kv.keys_LHCD[layer, :, : part.end]
    values_KCD = part.kv.values_LHCD[layer, :, : part.end]
    keys_KCD[:, part.context :] = key_1KND[0]
    values_KCD[:, part.context :] = value_1KND[0]
    mask = chunk.mask(window, query_1HND.device)
    read = scaled_dot_product_attention(
        query_1HND,
        keys_KCD[None],
        values_KCD[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_1HND.shape[1] != keys_KCD.shape[0],
    )
    return read.transpose(1, 2)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Any = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer. `layout` travels through the model's keyword arguments."""
    if layout is None:
        raise TypeError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name in ("softcap", "s_aux", "position_bias"):
        if other.get(name) is not None:
            raise TypeError(f"{type(module).__name__} needs {name}, which this attention does not compute")
    layer: Any = module.layer_idx
    return layout.attend(int(layer), query, key, value, scaling, sliding_window), None


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model computes for the engine; afterwards it is as its owner (a trainer, say) left it.

    No mask function goes by our name, so transformers makes no mask: the layout does.
    """
    AttentionInterface.register(NAME, attention)
    untyped: Any = model
    config = untyped.config
    before, training = config._attn_implementation, model.training
    if training:
        untyped.eval()
    config._attn_implementation = NAME
    try:
        with torch.inference_mode():
            yield
    finally:
        config._attn_implementation = before
        if training:
            untyped.train()
