"""`Readers`: attention of a step's new tokens over the KV cache, in one layer.

A reader stores the new keys and values of its parts, and attends: `PassBatch` for the parts of a slab in one masked
call, `Singles` for rows one by one, `LongChunk` for a chunk by itself, `Prefix` for what several parts have in common.

Shapes: T tokens of the step, M tokens that are read together, H query heads, K key/value heads, G = H / K query heads
per key/value head, D head size, S slots of a slab, N tokens of the longest chunk there, C tokens of a context including
the new ones, P tokens of a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ajet.engine.attention_rules import ALL, Rule, Visibility, attend
from ajet.engine.torch.kv_cache import KV

ALIGN = 16
"""Reads begin and end at multiples of this: PyTorch's softmax handles the rest of a vector element by element."""


@dataclass(slots=True)
class PassPart:
    """The new tokens of one sequence in a step: `count` tokens after `context` computed ones."""

    kv: KV
    context: int
    count: int

    @property
    def end(self) -> int:
        return self.context + self.count


class Member(NamedTuple):
    """A part, and where its tokens start in the step's row."""

    part: PassPart
    start: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.part.count)


class New(NamedTuple):
    """The queries, keys and values of a step's tokens in one layer.

    Query heads are grouped by the key/value head that they share, so keys and values are read once, not repeated.
    """

    query_TKGD: torch.Tensor
    key_TKD: torch.Tensor
    value_TKD: torch.Tensor

    @classmethod
    def of(cls, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor) -> New:
        heads, tokens, size = query_1HTD.shape[1:]
        groups = key_1KTD.shape[1]
        query_TKGD = query_1HTD[0].transpose(0, 1).reshape(tokens, groups, heads // groups, size)
        return cls(query_TKGD, key_1KTD[0].transpose(0, 1), value_1KTD[0].transpose(0, 1))


class Read(NamedTuple):
    """What attention reads for the tokens of a step in one layer, and the log-sum-exp of their scores."""

    values_TKGD: torch.Tensor
    lse_TKG: torch.Tensor | None


def can_join(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is an operator that returns the log-sum-exp: PyTorch's own for CPUs."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _tokens(members: list[Member], device: torch.device) -> slice | torch.Tensor:
    """The positions of the parts' tokens in the step's row: a slice if possible, as that costs almost nothing."""
    if all(before.span.stop == after.start for before, after in pairwise(members)):
        return slice(members[0].start, members[-1].span.stop)
    return torch.tensor([token for one in members for token in range(one.start, one.span.stop)], device=device)


class Prefix:
    """The first tokens of several parts, identical in all: read from one part's slot for the new tokens of all."""

    def __init__(self, members: list[Member], length: int) -> None:
        kv = members[0].part.kv
        self.tokens_M = _tokens(members, kv.keys_LHCD.device)
        self.keys = kv.keys_LHCD[:, :, None, :length].unbind(0)
        self.values = kv.values_LHCD[:, :, None, :length].unbind(0)

    def join(self, layer: int, new: New, read: Read, rule: Rule) -> None:
        """Combine this with the attention over the rest of the parts' contexts."""
        assert read.lse_TKG is not None
        query_KGMD = new.query_TKGD[self.tokens_M].permute(1, 2, 0, 3)
        shape = (-1, query_KGMD.shape[1], -1, -1)
        keys_KGPD, values_KGPD = self.keys[layer].expand(shape), self.values[layer].expand(shape)
        read_KGMD, lse_KGM = _flash(query_KGMD, keys_KGPD, values_KGPD, None, rule.scale)
        share_MKG = torch.sigmoid(lse_KGM.permute(2, 0, 1) - read.lse_TKG[self.tokens_M])
        rest_MKGD = read.values_TKGD[self.tokens_M]
        joined_MKGD = torch.lerp(rest_MKGD, read_KGMD.permute(2, 0, 1, 3), share_MKG[..., None].to(rest_MKGD.dtype))
        read.values_TKGD[self.tokens_M] = joined_MKGD
        if rule.sinks_H is not None:
            read.lse_TKG[self.tokens_M] = torch.logaddexp(read.lse_TKG[self.tokens_M], lse_KGM.permute(2, 0, 1))


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log-sum-exp of each query's scores."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    read, lse = operator(query, keys, values, 0.0, False, attn_mask=mask, scale=scaling)
    return read, lse


def _read_keys(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rule: Rule,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention's output for queries that each have their own key head, and, if requested, the log-sum-exp of their
    scores."""
    if rule.softcap is None and not with_lse:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=rule.scale), query
    if rule.softcap is None and can_join(query, values):
        return _flash(query, keys, values, mask, rule.scale)
    return attend(query, keys, values, mask, rule.scale or query.shape[-1] ** -0.5, rule.softcap)


class PassBatch:
    """Parts of one slab, read with one masked call over the slots from the first to the last of them.

    All are padded to the longest. They read from token `skip` on.
    """

    def __init__(self, members: list[Member], skip: int) -> None:
        slab = members[0].part.kv.slab
        device = slab.keys_LSHCD.device
        first = members[0].part.kv.slot
        self.skip = skip
        self.span = members[-1].part.kv.slot - first + 1
        self.most = max(member.part.count for member in members)
        longest = -(-max(member.part.end for member in members) // ALIGN) * ALIGN
        slots = slice(first, first + self.span)
        self.keys = slab.keys_LSHCD[:, slots, :, :longest].unbind(0)
        self.values = slab.values_LSHCD[:, slots, :, :longest].unbind(0)
        self.tokens_M = _tokens(members, device)
        cells: list[int] = []
        positions: list[int] = []
        for part, _ in members:
            cell = (part.kv.slot - first) * self.most
            cells += range(cell, cell + part.count)
            positions += range(part.context, part.end)
        self.cells_M, self.positions_M = torch.tensor([cells, positions], device=device).unbind(0)
        self.slots_M = self.cells_M // self.most
        self.is_full = len(cells) == self.span * self.most
        self.masks: dict[Visibility, torch.Tensor] = {}

    def read(self, layer: int, new: New, read: Read, rule: Rule) -> None:
        """Store what is new, and attend."""
        keys_SKCD, values_SKCD = self.keys[layer], self.values[layer]
        keys_SKCD[self.slots_M, :, self.positions_M] = new.key_TKD[self.tokens_M]
        values_SKCD[self.slots_M, :, self.positions_M] = new.value_TKD[self.tokens_M]
        query_SKGND = self._padded(new.query_TKGD[self.tokens_M])
        groups = query_SKGND.shape[2]
        query, keys, values = query_SKGND.flatten(2, 3), keys_SKCD[:, :, self.skip :], values_SKCD[:, :, self.skip :]
        mask = self._mask(rule.visibility, query, groups)
        output, lse = _read_keys(query, keys, values, mask, rule, with_lse=read.lse_TKG is not None)
        if read.lse_TKG is not None:
            read.lse_TKG[self.tokens_M] = self._picked(_unflatten(lse, 2, (groups, self.most)))
        read.values_TKGD[self.tokens_M] = self._picked(_unflatten(output, 2, (groups, self.most)))

    def _padded(self, query_MKGD: torch.Tensor) -> torch.Tensor:
        """As (S, K, G, N, D), zero where there is no part or no token."""
        padded = query_MKGD
        if not self.is_full:
            padded = query_MKGD.new_zeros(self.span * self.most, *query_MKGD.shape[1:])
            padded.index_copy_(0, self.cells_M, query_MKGD)
        return _unflatten(padded, 0, (self.span, self.most)).permute(0, 2, 3, 1, 4)

    def _picked(self, read_SKGND: torch.Tensor) -> torch.Tensor:
        """As (M, K, G, D), or (M, K, G) if there is no D."""
        read = read_SKGND.movedim(3, 1).flatten(0, 1)
        return read if self.is_full else read.index_select(0, self.cells_M)

    def _mask(self, visibility: Visibility, query: torch.Tensor, groups: int) -> torch.Tensor:
        """The mask added to the scores. Padding sees everything, as its result is discarded."""
        if visibility not in self.masks:
            length = self.keys[0].shape[2]
            last_SN1 = torch.full((self.span, self.most, 1), length - 1, device=query.device)
            last_SN1.view(-1)[self.cells_M] = self.positions_M
            key_C = torch.arange(self.skip, length, device=query.device)
            hidden_SNC = key_C > last_SN1
            if visibility is not ALL:
                hidden_SNC |= key_C < visibility.first(last_SN1)
            mask_SNC = query.new_zeros(hidden_SNC.shape).masked_fill_(hidden_SNC, float("-inf"))
            self.masks[visibility] = mask_SNC[:, None] if self.most == 1 else mask_SNC.repeat(1, groups, 1)[:, None]
        return self.masks[visibility]


def _unflatten(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


class Singles:
    """Rows that are read one by one, each starting at token `skip`."""

    def __init__(self, members: list[Member], skip: int) -> None:
        parts = [member.part for member in members]
        self.rows_M = _tokens(members, parts[0].kv.keys_LHCD.device)
        self.skip = skip
        self.last = [part.context for part in parts]
        # By layer, then row. `unbind` makes the views of all layers at once: slicing them one by one costs more than
        # attention itself when the model is small.
        self.keys = _by_layer([part.kv.keys_LHCD[:, None, :, skip : part.end].unbind(0) for part in parts])
        self.values = _by_layer([part.kv.values_LHCD[:, None, :, skip : part.end].unbind(0) for part in parts])
        self.new_keys = _by_layer([part.kv.keys_LHCD[:, :, part.context].unbind(0) for part in parts])
        self.new_values = _by_layer([part.kv.values_LHCD[:, :, part.context].unbind(0) for part in parts])

    def read(self, layer: int, new: New, read: Read, rule: Rule) -> None:
        """Store what is new, and attend."""
        torch._foreach_copy_(self.new_keys[layer], new.key_TKD[self.rows_M].unbind(0))
        torch._foreach_copy_(self.new_values[layer], new.value_TKD[self.rows_M].unbind(0))
        queries = new.query_TKGD[self.rows_M][:, None].unbind(0)
        outputs, sums = [], []
        for query_1KGD, last, keys_1KCD, values_1KCD in zip(
            queries, self.last, self.keys[layer], self.values[layer], strict=True
        ):
            first = max(0, rule.visibility.first(last) - self.skip)
            keys, values = keys_1KCD[:, :, first:], values_1KCD[:, :, first:]
            output, lse = _read_keys(query_1KGD, keys, values, None, rule, with_lse=read.lse_TKG is not None)
            outputs.append(output)
            sums.append(lse)
        read.values_TKGD[self.rows_M] = torch.cat(outputs)
        if read.lse_TKG is not None:
            read.lse_TKG[self.rows_M] = torch.cat(sums)


def _by_layer(rows: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    return [list(layer) for layer in zip(*rows, strict=True)]


class LongChunk:
    """A long chunk that is read alone."""

    def __init__(self, member: Member) -> None:
        self.part, self.span = member.part, member.span
        self.masks: dict[Visibility, torch.Tensor] = {}
        """By visibility: layers with the same share one."""

    def read(self, layer: int, new: New, read: Read, rule: Rule) -> None:
        """Store what is new, and attend."""
        part = self.part
        keys_KCD = part.kv.keys_LHCD[layer, :, : part.end]
        values_KCD = part.kv.values_LHCD[layer, :, : part.end]
        keys_KCD[:, part.context :] = new.key_TKD[self.span].transpose(0, 1)
        values_KCD[:, part.context :] = new.value_TKD[self.span].transpose(0, 1)
        if rule.softcap is not None or read.lse_TKG is not None:
            self._read_grouped(new, read, rule, keys_KCD, values_KCD)
            return
        query_HMD = new.query_TKGD[self.span].flatten(1, 2).transpose(0, 1)
        causal = part.context == 0 and rule.visibility is ALL
        output_HMD = scaled_dot_product_attention(
            query_HMD[None],
            keys_KCD[None],
            values_KCD[None],
            attn_mask=None if causal else self._mask(rule.visibility, query_HMD.device),
            is_causal=causal,
            scale=rule.scale,
            enable_gqa=query_HMD.shape[0] != keys_KCD.shape[0],
        )[0]
        read.values_TKGD[self.span].flatten(1, 2).copy_(output_HMD.transpose(0, 1))

    def _read_grouped(self, new: New, read: Read, rule: Rule, keys_KCD: torch.Tensor, values_KCD: torch.Tensor) -> None:
        """Read with the queries of a key head as one long list. Returns the log-sum-exp, too."""
        query_KGMD = new.query_TKGD[self.span].permute(1, 2, 0, 3)
        sizes = query_KGMD.shape[1], query_KGMD.shape[2]
        visible_MC = self._mask(rule.visibility, query_KGMD.device)
        mask_MC = query_KGMD.new_zeros(visible_MC.shape).masked_fill_(~visible_MC, float("-inf"))
        mask = mask_MC.repeat(sizes[0], 1)[None, None]
        output, lse = _read_keys(
            query_KGMD.flatten(1, 2)[None], keys_KCD[None], values_KCD[None], mask, rule, with_lse=True
        )
        read.values_TKGD[self.span] = _unflatten(output[0], 1, sizes).permute(2, 0, 1, 3)
        if read.lse_TKG is not None:
            read.lse_TKG[self.span] = _unflatten(lse[0], 1, sizes).permute(2, 0, 1)

    def _mask(self, visibility: Visibility, device: torch.device) -> torch.Tensor:
        """A boolean (M, C) mask of which context token each new token may see."""
        part = self.part
        if visibility not in self.masks:
            query_M1 = torch.arange(part.context, part.end, device=device)[:, None]
            key_1C = torch.arange(part.end, device=device)[None]
            self.masks[visibility] = (key_1C <= query_M1) & (key_1C >= visibility.first(query_M1))
        return self.masks[visibility]
