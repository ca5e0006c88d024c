"""`BlockAttention`: attention over a forest on a CPU, block by block, forward and backward.

`plan_calls` cuts a pack's blocks into calls: rows are causal, a branch sees the row that it left. What the calls of a
token read is joined by their log-sum-exp; the backward pass goes over the same calls with the joined log-sum-exp, which
gives each call's exact share. A chain in which everything is visible is a single causal call. Where a window or chunks
hide something, rows and branches are cut into tiles of queries, each with the keys that one of them sees, and a mask.

The calls run PyTorch's flash kernel; scores that are bent (a soft cap) have none, and are written out.

Shapes: N tokens of the pack, H heads, D head size, B rows of a batch, L columns, M queries, C keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ajet.engine.attention_rules import ALL, Visibility, attend, attend_backward
from ajet.trainer.pack import Blocks

SMALL_ROW = 256
"""Causal rows up to this length are padded to a common length and run as one batch. For longer rows, the padding would
cost more than the saved calls."""

ROW_STEP = 32
"""Small rows are padded to multiples of this."""

TILE = 256
"""Queries of a tile: smaller ones would cost more calls, larger ones compute more pairs that are masked."""


@dataclass(slots=True)
class RowBatch:
    """Small causal rows of similar length, to run as one batch: B rows, padded to L columns."""

    shape: tuple[int, int]
    """B, L."""
    gather: Tensor
    """[B * L] position in the pack of each (row, column); padding repeats the row's last position."""
    kept: Tensor
    """Indices in `gather` that aren't padding."""
    padding: Tensor
    """Indices in `gather` that are padding."""
    places: Tensor
    """`gather[kept]`."""

    @classmethod
    def of(cls, rows: list[tuple[int, int]], device: torch.device) -> RowBatch:
        """The ranges `rows` of a pack."""
        starts = torch.tensor([start for start, _ in rows])[:, None]
        lengths = torch.tensor([end - start for start, end in rows])[:, None]
        longest = int(lengths.max())
        column = torch.arange(longest)[None, :]
        gather = (starts + torch.minimum(column, lengths - 1)).flatten()
        valid = (column < lengths).flatten()
        kept, padding = valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]
        indices = (tensor.to(device) for tensor in (gather, kept, padding, gather[kept]))
        return cls((len(rows), longest), *indices)

    def take(self, tensor_NHD: Tensor) -> Tensor:
        """[B, H, L, D] (or without D) from the pack."""
        rows = tensor_NHD.flatten(1).index_select(0, self.gather)
        return rows.view(*self.shape, *tensor_NHD.shape[1:]).transpose(1, 2)

    def put(self, whole_NHD: Tensor, rows_BHLD: Tensor) -> None:
        """The inverse of `take`: write every row back into the pack, without its padding."""
        rows = rows_BHLD.transpose(1, 2).reshape(len(self.gather), -1)
        whole_NHD.flatten(1).index_copy_(0, self.places, rows.index_select(0, self.kept))

    def take_gradient(self, grad_NHD: Tensor) -> Tensor:
        """`take`, with zeros for padding."""
        rows = grad_NHD.flatten(1).index_select(0, self.gather).index_fill_(0, self.padding, 0)
        return rows.view(*self.shape, *grad_NHD.shape[1:]).transpose(1, 2)

    def hides(self, depth_N: Tensor, visibility: Visibility) -> Tensor:
        """[B, 1, L, L] what each may not see. Padding is deeper than the row, so no token of the row sees it."""
        depth_B1 = depth_N.index_select(0, self.gather).view(self.shape)[:, :1]
        depth_BL = depth_B1 + torch.arange(self.shape[1], device=depth_N.device)
        return _hides(depth_BL, depth_BL, visibility)[:, None]


class Tile(NamedTuple):
    """Queries, and a range of keys of which each of them sees at least one."""

    asking: slice | Tensor
    seen: slice
    masked: bool
    """Whether there are pairs that don't see each other."""


@dataclass(slots=True)
class Calls:
    """What a layer computes."""

    visibility: Visibility
    depth_N: Tensor
    masked_batches: bool
    batches: list[RowBatch]
    causal: list[slice]
    """Rows in which each token sees all before it."""
    rows: list[Tile]
    """Parts of other rows. Every token is in exactly one of these three."""
    above: list[Tile]
    """What branches see of the rows that they left."""

    def added(self, tile: Tile, like: Tensor) -> Tensor | None:
        """The tile's mask, to add to its scores."""
        if not tile.masked:
            return None
        return _added(_hides(self.depth_N[tile.asking], self.depth_N[tile.seen], self.visibility)[None, None], like)

    def added_to_batch(self, batch: RowBatch, like: Tensor) -> Tensor | None:
        """The batch's mask, to add to its scores; None if plain causality is enough."""
        return _added(batch.hides(self.depth_N, self.visibility), like) if self.masked_batches else None


def _hides(asking_M: Tensor, seen_C: Tensor, visibility: Visibility) -> Tensor:
    """By depth, for tokens on one path. The leading dimensions are those of both."""
    asking, seen = asking_M[..., :, None], seen_C[..., None, :]
    first: Tensor = visibility.first(asking)
    return (seen > asking) | (seen < first)


def _added(hides: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(hides.shape).masked_fill_(hides, float("-inf"))


def plan_calls(blocks: Blocks, depth_N: Tensor, visibility: Visibility, bent: bool) -> Calls:
    """The calls for layers with this visibility; `bent`: their scores are, so that no kernel knows what is causal."""
    depth = depth_N.tolist()
    plain = visibility is ALL and not bent
    batches, long = _batches(blocks.causal, depth_N.device)
    calls = Calls(visibility, depth_N, not plain, batches, [], [], [])
    for start, end in long:
        if plain or (not bent and visibility.first(depth[end - 1]) <= depth[start]):
            calls.causal.append(slice(start, end))
            continue
        for left in range(start, end, TILE):
            right = min(left + TILE, end)
            first = max(start, start + visibility.first(depth[left]) - depth[start])
            calls.rows.append(Tile(slice(left, right), slice(first, right), True))
    for asking_start, asking_end, seen_start, seen_end in blocks.full:
        if plain:
            calls.above.append(Tile(slice(asking_start, asking_end), slice(seen_start, seen_end), False))
        else:
            asking = torch.arange(asking_start, asking_end, device=depth_N.device)
            calls.above += _tiles_above(asking, seen_start, seen_end, depth_N, visibility)
    return calls


def _batches(rows: list[tuple[int, int]], device: torch.device) -> tuple[list[RowBatch], list[tuple[int, int]]]:
    """Small rows of similar length together, and the others."""
    large = [row for row in rows if row[1] - row[0] > SMALL_ROW]
    small: dict[int, list[tuple[int, int]]] = {}
    for start, end in rows:
        if end - start <= SMALL_ROW:
            small.setdefault(-(-(end - start) // ROW_STEP) * ROW_STEP, []).append((start, end))
    large += [alike[0] for alike in small.values() if len(alike) == 1]
    return [RowBatch.of(alike, device) for alike in small.values() if len(alike) > 1], large


def _tiles_above(asking: Tensor, start: int, end: int, depth_N: Tensor, visibility: Visibility) -> list[Tile]:
    """Find, tile by tile, those that still see something of the row above."""
    first_M = visibility.first(depth_N[asking])
    top, bottom = int(depth_N[start]), int(depth_N[end - 1])
    sees = first_M <= bottom
    asking, first_M = asking[sees], first_M[sees]
    tiles = []
    for at in range(0, len(asking), TILE):
        places, first = asking[at : at + TILE], first_M[at : at + TILE]
        whole = int(places[-1]) - int(places[0]) + 1 == len(places)
        seen = slice(start + max(0, int(first.min()) - top), end)
        masked = bool(first.max() > int(depth_N[seen.start]))
        tiles.append(Tile(slice(int(places[0]), int(places[-1]) + 1) if whole else places, seen, masked))
    return tiles


class _Kernel(NamedTuple):
    """One call, on tensors of [B, H, tokens, D]."""

    scale: float
    cap: float | None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, added: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        if self.cap is not None:
            return attend(query, key, value, added, self.scale, self.cap)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = kernel(query, key, value, 0.0, causal, attn_mask=added, scale=self.scale)
        return output, lse

    def backward(self, tensors: list[Tensor], added: Tensor | None, *, causal: bool = False) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, from that of the output, these three, the output and its lse."""
        if self.cap is not None:
            grad, query, key, value, output, lse = tensors
            return attend_backward(grad, query, key, value, output, lse, added, self.scale, self.cap)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, ...] = kernel(*tensors, 0.0, causal, attn_mask=added, scale=self.scale)
        return grads


class BlockAttention(torch.autograd.Function):
    """Attention over a forest, call by call. It saves what a single flash call over all tokens would save.

    Tensors are [tokens, heads, size], so what is gathered or written back is contiguous per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        calls: Calls,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        kernel = _Kernel(scale, cap)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        lse_NH = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for batch in calls.batches:
            added = calls.added_to_batch(batch, query)
            block, lse = kernel.forward(*map(batch.take, (query, key, value)), added=added, causal=added is None)
            batch.put(output, block)
            batch.put(lse_NH, lse)
        for here in calls.causal:
            block, lse = kernel.forward(_block(query[here]), _block(key[here]), _block(value[here]), causal=True)
            output[here], lse_NH[here] = _tokens(block), _tokens(lse)
        for index, tile in enumerate((*calls.rows, *calls.above)):
            seen = _block(key[tile.seen]), _block(value[tile.seen])
            read, lse = map(_tokens, kernel.forward(_block(query[tile.asking]), *seen, added=calls.added(tile, query)))
            if index >= len(calls.rows):
                before, lse_before = output[tile.asking], lse_NH[tile.asking]
                _join(before, lse_before, read, lse)
                if isinstance(tile.asking, slice):
                    continue  # these are views
                read, lse = before, lse_before
            output[tile.asking], lse_NH[tile.asking] = read, lse
        if sinks_H is not None:
            sinks = sinks_H.to(lse_NH.dtype)
            output *= torch.sigmoid(lse_NH - sinks)[..., None].to(output.dtype)
            lse_NH = torch.logaddexp(lse_NH, sinks)
        ctx.save_for_backward(query, key, value, output, lse_NH, sinks_H)
        ctx.calls, ctx.kernel = calls, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_NH, sinks_H = ctx.saved_tensors
        calls: Calls = ctx.calls
        kernel: _Kernel = ctx.kernel
        grad = grad.contiguous()
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for batch in calls.batches:
            rows = [batch.take(tensor) for tensor in (query, key, value, output, lse_NH)]
            added = calls.added_to_batch(batch, query)
            parts = kernel.backward([batch.take_gradient(grad), *rows], added, causal=added is None)
            for whole, part in zip(grads, parts, strict=True):
                batch.put(whole, part)
        for here in calls.causal:
            rows = [_block(tensor[here]) for tensor in (grad, query, key, value, output, lse_NH)]
            for whole, part in zip(grads, kernel.backward(rows, None, causal=True), strict=True):
                whole[here] = _tokens(part)
        for tile in (*calls.rows, *calls.above):
            where = (tile.asking, tile.asking, tile.seen, tile.seen, tile.asking, tile.asking)
            tensors = (grad, query, key, value, output, lse_NH)
            rows = [_block(tensor[place]) for tensor, place in zip(tensors, where, strict=True)]
            parts = kernel.backward(rows, calls.added(tile, query))
            for whole, part, place in zip(grads, parts, (tile.asking, tile.seen, tile.seen), strict=True):
                whole[place] += _tokens(part)
        grad_sinks_H = None
        if sinks_H is not None:
            read_NH = (grad.to(lse_NH.dtype) * output.to(lse_NH.dtype)).sum(-1)
            grad_sinks_H = -((sinks_H.to(lse_NH.dtype) - lse_NH).exp() * read_NH).sum(0).to(sinks_H.dtype)
        return *grads, grad_sinks_H, None, None, None


def _block(tensor_NHD: Tensor) -> Tensor:
    """[1, heads, tokens, ...], as the kernels expect it."""
    return tensor_NHD[None].transpose(1, 2)


def _tokens(block_1HND: Tensor) -> Tensor:
    """The inverse of `_block`."""
    return block_1HND.transpose(1, 2)[0]


def _join(output: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Add a block's keys to attention computed over other keys, in place."""
    share = torch.sigmoid(block_lse - lse)
    output.lerp_(block, share.unsqueeze(-1).to(output.dtype))
    torch.logaddexp(lse, block_lse, out=lse)
