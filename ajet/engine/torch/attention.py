"""Attention over the engine's own keys and values, under transformers' public attention interface.

All tokens of a step, of all sequences, go through the model as one row. Each attention layer hands us queries, keys and
values; the step's `Layout` knows which tokens belong to which sequence, stores the new keys and values there, and
attends within each. A sequence with one new token (a reply being drawn) is a *row*, one with more is a *chunk*.

Shapes: T tokens of the step, H query heads, K key/value heads, G = H / K query heads a key/value head, D head size,
N tokens of a chunk, C tokens of its context and itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ajet.engine.torch.kv import KV

NAME = "ajet_engine"


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
    """Where the tokens of one step belong: first the rows, one token each, then the chunks."""

    def __init__(self, rows: list[Part], chunks: list[Part]) -> None:
        self.rows = len(rows)
        self.chunks: list[Chunk] = []
        start = self.rows
        for part in chunks:
            self.chunks.append(Chunk(part, start))
            start += part.count
        # By layer, then row. `unbind` makes the views of all layers at once: slicing them one by one costs more than
        # attention itself when the model is small.
        keys = [row.kv.keys_LHCD for row in rows]
        values = [row.kv.values_LHCD for row in rows]
        self.seen_keys = _by_layer([k[:, None, :, : row.end].unbind(0) for k, row in zip(keys, rows, strict=True)])
        self.seen_values = _by_layer([v[:, None, :, : row.end].unbind(0) for v, row in zip(values, rows, strict=True)])
        self.new_keys = _by_layer([k[:, :, row.context].unbind(0) for k, row in zip(keys, rows, strict=True)])
        self.new_values = _by_layer([v[:, :, row.context].unbind(0) for v, row in zip(values, rows, strict=True)])

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
            output_1THD[0, : self.rows] = self._attend_rows(layer, query_1HTD, key_1KTD, value_1KTD, scaling, window)
        for chunk in self.chunks:
            span = slice(chunk.start, chunk.start + chunk.part.count)
            output_1THD[:, span] = _attend_chunk(
                chunk, layer, query_1HTD[:, :, span], key_1KTD[:, :, span], value_1KTD[:, :, span], scaling, window
            )
        return output_1THD

    def _attend_rows(
        self,
        layer: int,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        rows, heads, groups = self.rows, query_1HTD.shape[1], key_1KTD.shape[1]
        torch._foreach_copy_(self.new_keys[layer], key_1KTD[0, :, :rows].unbind(1))
        torch._foreach_copy_(self.new_values[layer], value_1KTD[0, :, :rows].unbind(1))
        # The query heads that share a key/value head stand as its queries: keys and values are read once, not repeated.
        query_R = query_1HTD[0, :, :rows].transpose(0, 1).reshape(rows, 1, groups, heads // groups, -1).unbind(0)
        read = []
        for query_1KGD, keys_1KCD, values_1KCD in zip(
            query_R, self.seen_keys[layer], self.seen_values[layer], strict=True
        ):
            keys, values = keys_1KCD, values_1KCD
            if window is not None and keys.shape[2] > window:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            read.append(scaled_dot_product_attention(query_1KGD, keys, values, scale=scaling))
        return torch.cat(read).reshape(rows, heads, -1)


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
