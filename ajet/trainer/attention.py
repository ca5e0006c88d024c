"""Attention over a packed forest, through transformers' public attention interface: no code per model.

`tree_attention(model)` makes a Hugging Face causal model accept packs: inside it, `model(..., **pack_arguments)` runs
with an attention function in which a token sees its ancestors and nothing else. There are three implementations:

- CPU: PyTorch's flash kernel on the pack's blocks one by one (rows are causal; a branch sees the row that it left
  unmasked), joined by their log-sum-exp. The backward pass goes over the same blocks with the joined log-sum-exp, which
  gives each block's exact share. A chain is a single causal call.
- GPU: FlexAttention with a block mask. *Unverified*: it has no backward pass on CPUs and has not been run on a GPU yet.
- Anything else (other devices, missing kernels): PyTorch SDPA with a dense mask, correct but slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from ajet.trainer.pack import Blocks, Pack

NAME = "ajet_tree"
"""The attention implementation's name in transformers' registry."""

SMALL_ROW = 256
"""Causal rows up to this length are padded to a common length and run as one batch. For longer rows, the padding would
cost more than the saved calls."""

ROW_STEP = 32
"""Small rows are padded to multiples of this."""


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that doesn't work on a forest: soft capping, sinks, a short window."""


@dataclass(slots=True)
class AttentionPlan:
    """The layout of one pack on the model's device."""

    blocks: Blocks
    ends: Tensor
    depth: int
    """Longest root-to-leaf path."""
    batches: list[_RowBatch]
    flex_mask: Any = None


@dataclass(slots=True)
class _RowBatch:
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
    def of(cls, rows: list[tuple[int, int]], device: torch.device) -> _RowBatch:
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


def plan_attention(pack: Pack, device: torch.device) -> AttentionPlan:
    """Prepare what the attention function needs, once per pack (all layers share it)."""
    large = [row for row in pack.blocks.causal if row[1] - row[0] > SMALL_ROW]
    small: dict[int, list[tuple[int, int]]] = {}
    for start, end in pack.blocks.causal:
        if end - start <= SMALL_ROW:
            small.setdefault(-(-(end - start) // ROW_STEP) * ROW_STEP, []).append((start, end))
    batches = []
    for rows in small.values():
        if len(rows) == 1:
            large += rows
            continue
        batches.append(_RowBatch.of(rows, device))
    ends = torch.from_numpy(pack.ends).to(device)
    depth = int(pack.positions.max()) + 1 if len(pack) else 0
    plan = AttentionPlan(Blocks(large, pack.blocks.full), ends, depth, batches)
    if device.type == "cuda":
        plan.flex_mask = _flex_block_mask(ends)
    return plan


def pack_arguments(pack: Pack, plan: AttentionPlan) -> dict[str, Any]:
    """The keyword arguments of the model's forward for this pack."""
    device = plan.ends.device
    return {
        "input_ids": torch.from_numpy(pack.ids).to(device)[None],
        "position_ids": torch.from_numpy(pack.positions).to(device)[None],
        "use_cache": False,
        "ajet_plan": plan,
    }


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Inside it (forward *and* backward), the model's attention is ours; afterwards it is what it was."""
    _register()
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@cache
def _register() -> None:
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The pack defines which token sees which, so transformers needs no mask."""


def _attention(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ajet_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. H query heads share G key/value heads; N tokens; head size D."""
    depth = query_1HND.shape[2] if ajet_plan is None else ajet_plan.depth  # None: ordinary rows (`RowForward`)
    if sliding_window is not None and sliding_window < depth:
        raise UnsupportedAttentionError(f"a sliding window of {sliding_window} is shorter than the longest path")
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} uses {option}")
    if dropout:
        raise UnsupportedAttentionError("attention dropout")
    scale = scaling if scaling is not None else query_1HND.shape[-1] ** -0.5
    if ajet_plan is None:
        gqa = query_1HND.shape[1] != key_1GND.shape[1]
        rows = torch.nn.functional.scaled_dot_product_attention(
            query_1HND, key_1GND, value_1GND, is_causal=True, scale=scale, enable_gqa=gqa
        )
        return rows.transpose(1, 2), None
    if ajet_plan.flex_mask is not None:
        return _flex(query_1HND, key_1GND, value_1GND, ajet_plan, scale), None
    if query_1HND.device.type == "cpu" and key_1GND.shape[-1] == value_1GND.shape[-1] and _has_cpu_kernel():
        heads = query_1HND.shape[1]
        query, key, value = (_for_heads(_tokens(tensor), heads) for tensor in (query_1HND, key_1GND, value_1GND))
        output: Tensor = _BlockAttention.apply(query, key, value, ajet_plan, scale)  # type: ignore[no-untyped-call]
        return output[None], None
    return _dense(query_1HND, key_1GND, value_1GND, ajet_plan, scale).transpose(1, 2), None


# ---------------------------------------------------------------- CPU, block by block


def _for_heads(tensor_NGD: Tensor, heads: int) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    groups = heads // tensor_NGD.shape[1]
    return tensor_NGD.repeat_interleave(groups, dim=1) if groups > 1 else tensor_NGD


@cache
def _has_cpu_kernel() -> bool:
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return all(hasattr(torch.ops.aten, name) for name in names)


class _BlockAttention(torch.autograd.Function):
    """Attention over a forest, block by block. It saves what a single flash call over all tokens would save.

    Tensors are [tokens, heads, size], so what is gathered or written back is contiguous per token.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        lse_NH = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for batch in plan.batches:
            block, lse = kernel(batch.take(query), batch.take(key), batch.take(value), 0.0, True, scale=scale)
            batch.put(output, block)
            batch.put(lse_NH, lse)
        for start, end in plan.blocks.causal:
            here = slice(start, end)
            block, lse = kernel(_block(query[here]), _block(key[here]), _block(value[here]), 0.0, True, scale=scale)
            output[here] = _tokens(block)
            lse_NH[here] = _tokens(lse)
        for query_start, query_end, key_start, key_end in plan.blocks.full:
            asking, seen = slice(query_start, query_end), slice(key_start, key_end)
            block, lse = kernel(_block(query[asking]), _block(key[seen]), _block(value[seen]), 0.0, False, scale=scale)
            _join(output[asking], lse_NH[asking], _tokens(block), _tokens(lse))
        ctx.save_for_backward(query, key, value, output, lse_NH)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, output, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        grad = grad.contiguous()
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for batch in plan.batches:
            rows = [batch.take(tensor) for tensor in (query, key, value, output, lse)]
            parts = kernel(batch.take_gradient(grad), *rows, 0.0, True, scale=ctx.scale)
            for whole, part in zip(grads, parts, strict=True):
                batch.put(whole, part)
        for start, end in plan.blocks.causal:
            at = slice(start, end)
            rows = [_block(tensor[at]) for tensor in (grad, query, key, value, output, lse)]
            for whole, part in zip(grads, kernel(*rows, 0.0, True, scale=ctx.scale), strict=True):
                whole[at] = _tokens(part)
        for query_start, query_end, key_start, key_end in plan.blocks.full:
            asking, seen = slice(query_start, query_end), slice(key_start, key_end)
            tensors = (grad, query, key, value, output, lse)
            where = (asking, asking, seen, seen, asking, asking)
            rows = [_block(tensor[place]) for tensor, place in zip(tensors, where, strict=True)]
            parts = kernel(*rows, 0.0, False, scale=ctx.scale)
            for whole, part, place in zip(grads, parts, (asking, seen, seen), strict=True):
                whole[place] += _tokens(part)
        return grads[0], grads[1], grads[2], None, None


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


# ---------------------------------------------------------------- other implementations


def _dense(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    places = torch.arange(len(plan.ends), device=query.device)
    gqa = query.shape[1] != key.shape[1]
    sees = (places[None, :] <= places[:, None]) & (places[:, None] < plan.ends[None, :])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=scale, enable_gqa=gqa
    )


def _flex_block_mask(ends: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(_batch: Tensor, _head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        return (seen <= asking) & (asking < ends[seen])

    return create_block_mask(sees, None, None, len(ends), len(ends), device=str(ends.device))


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _flex(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    output: Tensor = _compiled_flex()(query, key, value, block_mask=plan.flex_mask, scale=scale, enable_gqa=gqa)
    return output
