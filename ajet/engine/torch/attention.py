"""Attention over the engine's own keys and values, through transformers' public attention interface.

All tokens of a step, from all sequences, go through the model as one row. Each attention layer passes us queries, keys
and values; the step's `StepLayout` knows which tokens belong to which sequence, stores the new keys and values there,
and attends within each. A sequence with one new token (a reply being drawn) is a *row*, one with more is a *chunk*.

On a CPU, attention costs as much as it reads, plus a fixed cost per call. So rows and short chunks of a slab share a
call (`Batch`). And tokens that many sequences have in common, copied from one slot, are read from that slot for all of
them at once (`Prefix`), and joined with what each has of its own.

Shapes: T tokens of the step, M tokens that are read together, H query heads, K key/value heads, G = H / K query heads
per key/value head, D head size, S slots of a slab, N tokens of the longest chunk there, C tokens of a context including
the new ones, P tokens of a prefix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ajet.engine.torch.kv_cache import KV

NAME = "ajet_engine"

CALL_TOKENS = 128
"""What a separate call costs a row, in tokens read (measured on a CPU: 100 to 200)."""
CHUNK_CALL_TOKENS = 512
"""The same for a chunk, which has to be masked and moved (estimated from single calls)."""
QUERY_SHARE = 0.25
"""What another query on the same keys costs, relative to the first one, which has to fetch them."""
SHORT = 64
"""Chunks with more tokens gain nothing from sharing calls or reads: arithmetic dominates."""
PREFIX_TOKENS = 2048
"""What reading and joining a shared prefix costs, in tokens read (estimated from single calls)."""
ALIGN = 16
"""Reads begin and end at multiples of this: PyTorch's softmax handles the rest of a vector element by element."""


@dataclass(slots=True)
class Part:
    """The new tokens of one sequence in a step: `count` tokens after `context` computed ones."""

    kv: KV
    context: int
    count: int

    @property
    def end(self) -> int:
        return self.context + self.count


class Member(NamedTuple):
    """A part, and where its tokens start in the step's row."""

    part: Part
    start: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.part.count)


class _New(NamedTuple):
    """The queries, keys and values of a step's tokens in one layer.

    Query heads are grouped by the key/value head that they share, so keys and values are read once, not repeated.
    """

    query_TKGD: torch.Tensor
    key_TKD: torch.Tensor
    value_TKD: torch.Tensor

    @classmethod
    def of(cls, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor) -> _New:
        heads, tokens, size = query_1HTD.shape[1:]
        groups = key_1KTD.shape[1]
        query_TKGD = query_1HTD[0].transpose(0, 1).reshape(tokens, groups, heads // groups, size)
        return cls(query_TKGD, key_1KTD[0].transpose(0, 1), value_1KTD[0].transpose(0, 1))


class _Read(NamedTuple):
    """What attention reads for the tokens of a step in one layer, and the log-sum-exp of their scores."""

    values_TKGD: torch.Tensor
    lse_TKG: torch.Tensor | None


class StepLayout:
    """Where the tokens of one step belong: first those of the rows, then those of the chunks, in the given order.

    With `apart`, every part is read by itself: its result is then independent of what else is in the step.
    """

    def __init__(self, rows: list[Part], chunks: list[Part], *, apart: bool = False) -> None:
        self.members: list[Member] = []
        start = 0
        for part in (*rows, *chunks):
            part.kv.write_from(part.context)
            self.members.append(Member(part, start))
            start += part.count
        self.apart = apart
        self.longest = max((part.end for part in (*rows, *chunks)), default=0)

    @cached_property
    def plain(self) -> LayerPlan:
        """Every part reads its whole context."""
        return LayerPlan.apart(self.members) if self.apart else LayerPlan.together(self.members)

    @cached_property
    def sharing(self) -> LayerPlan:
        """Shared prefixes are read once."""
        prefixes = [] if self.apart else shared_prefixes(self.members)
        return LayerPlan.of_prefixes(self.members, prefixes) if prefixes else self.plain

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
        new = _New.of(query_1HTD, key_1KTD, value_1KTD)
        sees_all = window is None or window >= self.longest
        plan = self.sharing if sees_all and can_join(query_1HTD, value_1KTD) else self.plain
        values_TKGD = query_1HTD.new_zeros(*new.query_TKGD.shape[:3], value_1KTD.shape[-1])
        lse_TKG = values_TKGD.new_empty(values_TKGD.shape[:3], dtype=torch.float32) if plan.prefixes else None
        read = _Read(values_TKGD, lse_TKG)
        for reader in plan.readers:
            reader.read(layer, new, read, scaling, window)
        for prefix in plan.prefixes:
            prefix.join(layer, new, read, scaling)
        return values_TKGD.view(1, tokens, heads, -1)


def can_join(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is an operator that returns the log-sum-exp: PyTorch's own for CPUs."""
    kernel = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return kernel and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


class LayerPlan(NamedTuple):
    """The calls of one layer. What the readers read is joined with the prefixes."""

    readers: list[Batch | Singles | LongChunk]
    prefixes: list[Prefix]

    @classmethod
    def apart(cls, members: list[Member]) -> LayerPlan:
        rows, chunks = _split(members, 1)
        readers: list[Batch | Singles | LongChunk] = [Singles(rows, 0)] if rows else []
        return cls([*readers, *map(LongChunk, chunks)], [])

    @classmethod
    def together(cls, members: list[Member], skip: int = 0) -> LayerPlan:
        """Parts of a slab in one call where that pays. They leave out the first `skip` tokens."""
        short, long = _split(members, SHORT)
        readers: list[Batch | Singles | LongChunk] = []
        singles: list[Member] = []
        for alike in _alike(short):
            if worth_one_call(alike, skip):
                readers.append(Batch(alike, skip))
            elif alike[0].part.count == 1:
                singles += alike
            else:
                readers += [Batch([member], skip) for member in alike]
        if singles:
            readers.append(Singles(singles, skip))
        return cls([*readers, *map(LongChunk, long)], [])

    @classmethod
    def of_prefixes(cls, members: list[Member], prefixes: list[tuple[int, list[Member]]]) -> LayerPlan:
        plan = cls([], [])
        shared = {member.start for _, holders in prefixes for member in holders}
        for length, holders in (*prefixes, (0, [member for member in members if member.start not in shared])):
            plan.readers.extend(cls.together(holders, length).readers)
        plan.prefixes.extend(Prefix(holders, length) for length, holders in prefixes)
        return plan


def _split(members: list[Member], largest: int) -> tuple[list[Member], list[Member]]:
    """Those with up to `largest` new tokens, and those with more."""
    return [one for one in members if one.part.count <= largest], [one for one in members if one.part.count > largest]


def _alike(members: list[Member]) -> list[list[Member]]:
    """Groups of rows in the same slab, and of chunks in the same slab and of similar length, ordered by slot."""
    kinds: dict[tuple[int, int], list[Member]] = defaultdict(list)
    for member in members:
        part = member.part
        kinds[id(part.kv.slab), -1 if part.count == 1 else 2 * part.count // SHORT].append(member)
    return [sorted(alike, key=lambda member: member.part.kv.slot) for alike in kinds.values()]


def worth_one_call(members: list[Member], skip: int = 0) -> bool:
    """Whether one call pays: it reads all slots from the first part's to the last's, each as if it were the longest."""
    span = members[-1].part.kv.slot - members[0].part.kv.slot + 1
    most, longest = max(one.part.count for one in members), max(one.part.end for one in members)
    needed = sum(_cost(one.part.count, one.part.end - skip) for one in members)
    call = CALL_TOKENS if most == 1 else CHUNK_CALL_TOKENS
    return len(members) > 1 and span * _cost(most, longest - skip) - needed <= call * len(members)


def _cost(queries: int, tokens: int) -> float:
    """The cost of reading `tokens` for several queries, in tokens that one query reads."""
    return tokens * (1 + QUERY_SHARE * (queries - 1))


def shared_prefixes(members: list[Member]) -> list[tuple[int, list[Member]]]:
    """The prefixes that are worth reading for several parts at once: their lengths, and the parts that have them.

    Each part is in one of them at most: the one that saves its holders the most reading.
    """
    holders: dict[int, list[tuple[int, Member]]] = defaultdict(list)
    for member in members:
        if member.part.count <= SHORT:
            for origin, end in member.part.kv.shared_until(member.part.context):
                holders[origin].append((end - end % ALIGN, member))
    found = []
    while holders:
        saved, length, chosen = max((_best_length(ends) for ends in holders.values()), key=lambda best: best[0])
        if saved <= 0:
            break
        found.append((length, chosen))
        taken = {member.start for member in chosen}
        left = {origin: [one for one in ends if one[1].start not in taken] for origin, ends in holders.items()}
        holders = {origin: ends for origin, ends in left.items() if ends}
    return found


_END = itemgetter(0)


def _best_length(ends: list[tuple[int, Member]]) -> tuple[float, int, list[Member]]:
    """For a prefix of which parts hold more or less: the savings per holder, the best length, and its holders."""
    ends = sorted(ends, key=_END, reverse=True)
    saved, number = max(((end * index - PREFIX_TOKENS) / (index + 1), index + 1) for index, (end, _) in enumerate(ends))
    return saved, ends[number - 1][0], [member for _, member in ends[:number]]


def _tokens(members: list[Member], device: torch.device) -> slice | torch.Tensor:
    """Where the parts' tokens are in the step's row: a slice if possible, because that costs almost nothing."""
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

    def join(self, layer: int, new: _New, read: _Read, scaling: float | None) -> None:
        """Join this with what the parts have read of the rest of their contexts."""
        assert read.lse_TKG is not None
        query_KGMD = new.query_TKGD[self.tokens_M].permute(1, 2, 0, 3)
        shape = (-1, query_KGMD.shape[1], -1, -1)
        keys_KGPD, values_KGPD = self.keys[layer].expand(shape), self.values[layer].expand(shape)
        read_KGMD, lse_KGM = _flash(query_KGMD, keys_KGPD, values_KGPD, None, scaling)
        share_MKG = torch.sigmoid(lse_KGM.permute(2, 0, 1) - read.lse_TKG[self.tokens_M])
        rest_MKGD = read.values_TKGD[self.tokens_M]
        joined_MKGD = torch.lerp(rest_MKGD, read_KGMD.permute(2, 0, 1, 3), share_MKG[..., None].to(rest_MKGD.dtype))
        read.values_TKGD[self.tokens_M] = joined_MKGD


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log-sum-exp of each query's scores."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    read, lse = operator(query, keys, values, 0.0, False, attn_mask=mask, scale=scaling)
    return read, lse


class Batch:
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
        self.masks: dict[int | None, torch.Tensor] = {}

    def read(self, layer: int, new: _New, read: _Read, scaling: float | None, window: int | None) -> None:
        """Store what is new, and attend."""
        keys_SKCD, values_SKCD = self.keys[layer], self.values[layer]
        keys_SKCD[self.slots_M, :, self.positions_M] = new.key_TKD[self.tokens_M]
        values_SKCD[self.slots_M, :, self.positions_M] = new.value_TKD[self.tokens_M]
        query_SKGND = self._padded(new.query_TKGD[self.tokens_M])
        groups = query_SKGND.shape[2]
        query, keys, values = query_SKGND.flatten(2, 3), keys_SKCD[:, :, self.skip :], values_SKCD[:, :, self.skip :]
        mask = self._mask(window, query, groups)
        if read.lse_TKG is None:
            output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        else:
            output, lse = _flash(query, keys, values, mask, scaling)
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

    def _mask(self, window: int | None, query: torch.Tensor, groups: int) -> torch.Tensor:
        """What is added to the scores. Padding sees everything; its result is thrown away."""
        if window not in self.masks:
            length = self.keys[0].shape[2]
            last_SN1 = torch.full((self.span, self.most, 1), length - 1, device=query.device)
            last_SN1.view(-1)[self.cells_M] = self.positions_M
            key_C = torch.arange(self.skip, length, device=query.device)
            hidden_SNC = key_C > last_SN1
            if window is not None:
                hidden_SNC |= key_C <= last_SN1 - window
            mask_SNC = query.new_zeros(hidden_SNC.shape).masked_fill_(hidden_SNC, float("-inf"))
            self.masks[window] = mask_SNC[:, None] if self.most == 1 else mask_SNC.repeat(1, groups, 1)[:, None]
        return self.masks[window]


def _unflatten(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


class Singles:
    """Rows that are read one by one, each from `skip` on."""

    def __init__(self, members: list[Member], skip: int) -> None:
        parts = [member.part for member in members]
        self.rows_M = _tokens(members, parts[0].kv.keys_LHCD.device)
        # By layer, then row. `unbind` makes the views of all layers at once: slicing them one by one costs more than
        # attention itself when the model is small.
        self.keys = _by_layer([part.kv.keys_LHCD[:, None, :, skip : part.end].unbind(0) for part in parts])
        self.values = _by_layer([part.kv.values_LHCD[:, None, :, skip : part.end].unbind(0) for part in parts])
        self.new_keys = _by_layer([part.kv.keys_LHCD[:, :, part.context].unbind(0) for part in parts])
        self.new_values = _by_layer([part.kv.values_LHCD[:, :, part.context].unbind(0) for part in parts])

    def read(self, layer: int, new: _New, read: _Read, scaling: float | None, window: int | None) -> None:
        """Store what is new, and attend."""
        torch._foreach_copy_(self.new_keys[layer], new.key_TKD[self.rows_M].unbind(0))
        torch._foreach_copy_(self.new_values[layer], new.value_TKD[self.rows_M].unbind(0))
        queries = new.query_TKGD[self.rows_M][:, None].unbind(0)
        outputs, sums = [], []
        for query_1KGD, keys_1KCD, values_1KCD in zip(queries, self.keys[layer], self.values[layer], strict=True):
            keys, values = keys_1KCD, values_1KCD
            if window is not None and keys.shape[2] > window:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            if read.lse_TKG is None:
                outputs.append(scaled_dot_product_attention(query_1KGD, keys, values, scale=scaling))
            else:
                output, lse = _flash(query_1KGD, keys, values, None, scaling)
                outputs.append(output)
                sums.append(lse)
        read.values_TKGD[self.rows_M] = torch.cat(outputs)
        if read.lse_TKG is not None:
            read.lse_TKG[self.rows_M] = torch.cat(sums)


def _by_layer(rows: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    return [list(layer) for layer in zip(*rows, strict=True)]


class LongChunk:
    """A chunk, read by itself."""

    def __init__(self, member: Member) -> None:
        self.part, self.span = member.part, member.span
        self.masks: dict[int | None, torch.Tensor | None] = {}
        """By window: layers with the same window share one."""

    def read(self, layer: int, new: _New, read: _Read, scaling: float | None, window: int | None) -> None:
        """Store what is new, and attend."""
        part = self.part
        keys_KCD = part.kv.keys_LHCD[layer, :, : part.end]
        values_KCD = part.kv.values_LHCD[layer, :, : part.end]
        keys_KCD[:, part.context :] = new.key_TKD[self.span].transpose(0, 1)
        values_KCD[:, part.context :] = new.value_TKD[self.span].transpose(0, 1)
        query_HMD = new.query_TKGD[self.span].flatten(1, 2).transpose(0, 1)
        mask = self._mask(window, query_HMD.device)
        output_HMD = scaled_dot_product_attention(
            query_HMD[None],
            keys_KCD[None],
            values_KCD[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query_HMD.shape[0] != keys_KCD.shape[0],
        )[0]
        read.values_TKGD[self.span].flatten(1, 2).copy_(output_HMD.transpose(0, 1))

    def _mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which of C each of M may see; None if plain causality within the chunk is enough."""
        part = self.part
        if part.context == 0 and (window is None or part.count <= window):
            return None
        if window not in self.masks:
            query_M1 = torch.arange(part.context, part.end, device=device)[:, None]
            key_1C = torch.arange(part.end, device=device)[None]
            visible = key_1C <= query_M1
            self.masks[window] = visible if window is None else visible & (key_1C > query_M1 - window)
        return self.masks[window]


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
    """What transformers calls in every attention layer. `layout` arrives through the model's keyword arguments."""
    if layout is None:
        raise TypeError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name in ("softcap", "s_aux", "position_bias"):
        if other.get(name) is not None:
            raise TypeError(f"{type(module).__name__} needs {name}, which this attention does not compute")
    layer: Any = module.layer_idx
    return layout.attend(int(layer), query, key, value, scaling, sliding_window), None


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes for the engine; afterwards it is as its owner (a trainer, say) left it.

    No mask function is registered under our name, so transformers makes no mask: the layout does.
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
