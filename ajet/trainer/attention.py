"""A packed forest in a model's layers, through transformers' public interfaces: no code per model.

`tree_attention(model)` makes a Hugging Face causal model accept packs: inside it, `model(..., **pack_arguments)` runs
with an attention function in which a token sees only its ancestors, as far back as its layer's rule allows. There are
three implementations:

- CPU: block by block (see `block_attention`).
- GPU: FlexAttention with a block mask. *Unverified* on a GPU: a CPU can test its formulas, forward and backward, not
  its kernels.
- Anything else (other devices, keys of another size than values): a dense mask, correct but slow.

Layers that keep a state from token to token (`branching`): the state at a fork is computed once, and each branch goes
on from it. A pack is cut into segments, where it forks. A segment that others go on from is computed by itself, so that
its end is its last token; all that end in leaves run as one padded batch, each on the state of the segment before it.
Gradients go back through the states.

Shapes: N tokens of a pack, B rows or segments of a call, H heads, D head size, W width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from ajet.engine.attention_rules import (
    ALL,
    REFUSALS,
    Rule,
    UnsupportedAttentionError,
    Visibility,
    attend,
    attending,
    query_correction,
    visibility_of,
    visibility_of_mask,
)
from ajet.engine.layers import causal_model, replaced
from ajet.engine.torch import LayerCache, LayerState, Mixer, mixers_of
from ajet.trainer.block_attention import BlockAttention, Calls, plan_calls
from ajet.trainer.pack import Blocks, Indices, Pack

NAME = "ajet_tree"
"""The attention implementation's name in transformers' registry."""


@dataclass(slots=True)
class AttentionPlan:
    """The layout of one pack on the model's device, and what the layers have computed from it."""

    blocks: Blocks
    ends_N: Tensor
    depth_N: Tensor
    longest: int
    """Tokens of the longest path."""
    calls: dict[tuple[Visibility, bool], Calls] = field(default_factory=dict)
    """For CPUs: calls by visibility and whether scores are modified. Layers with the same rule share them."""
    segments: list[PackSegment] = field(default_factory=list)
    """Where it forks, for layers that keep a state."""
    flex_masks: dict[Visibility, Any] = field(default_factory=dict)
    """On GPUs."""

    def calls_for(self, rule: Rule) -> Calls:
        """What a layer with this rule computes, call by call."""
        key = rule.visibility, rule.softcap is not None
        if key not in self.calls:
            self.calls[key] = plan_calls(self.blocks, self.depth_N, *key)
        return self.calls[key]

    def flex_mask(self, visibility: Visibility) -> Any:
        """FlexAttention's mask of which token sees which."""
        if visibility not in self.flex_masks:
            self.flex_masks[visibility] = _flex_block_mask(self.ends_N, self.depth_N, visibility)
        return self.flex_masks[visibility]

    def sees(self, visibility: Visibility) -> Tensor:
        """A boolean matrix: which token (row) sees which (column)."""
        places = torch.arange(len(self.ends_N), device=self.ends_N.device)
        sees = (places[None, :] <= places[:, None]) & (places[:, None] < self.ends_N[None, :])
        first_N: Tensor = visibility.first(self.depth_N)
        return sees & (self.depth_N[None, :] >= first_N[:, None])


def plan_attention(pack: Pack, device: torch.device) -> AttentionPlan:
    """Prepare the attention function's inputs, once per pack. All layers share them."""
    ends_N, depth_N = (torch.from_numpy(values).to(device) for values in (pack.ends, pack.positions))
    longest = int(pack.positions.max()) + 1 if len(pack) else 0
    return AttentionPlan(pack.blocks, ends_N, depth_N, longest, segments=segments_of(pack.ends))


def pack_arguments(pack: Pack, plan: AttentionPlan) -> dict[str, Any]:
    """The keyword arguments of the model's forward for this pack."""
    ids = torch.from_numpy(pack.ids).to(plan.ends_N.device)[None]
    return {
        "input_ids": ids,
        "position_ids": plan.depth_N[None],
        "attention_mask": torch.ones_like(ids),  # without, transformers takes a branch for another sequence
        "use_cache": False,
        "ajet_plan": plan,
    }


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Replace the model's attention for the block (forward *and* backward), and restore it afterwards."""
    _register()
    base: Any = causal_model(model)
    with branching(base), attending(base, NAME):
        yield


@cache
def _register() -> None:
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, visibility_of_mask)


@cache
def attention_left_whole() -> None:
    """From now on, PyTorch's compiler treats the attention of packs as an opaque call."""
    _register()
    disable: Any = torch.compiler.disable  # it loads the compiler, which takes a second
    transformers.AttentionInterface.register(NAME, disable(_attention))


def _attention(
    module: torch.nn.Module,
    query_BHND: Tensor,
    key_BGND: Tensor,
    value_BGND: Tensor,
    attention_mask: Visibility | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    ajet_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. H query heads share G key/value heads; N tokens; head size
    D."""
    if dropout:
        raise UnsupportedAttentionError("attention dropout")
    visibility = visibility_of(attention_mask)
    longest = query_BHND.shape[2] if ajet_plan is None else ajet_plan.longest
    scale = scaling if scaling is not None else query_BHND.shape[-1] ** -0.5
    rule = Rule.of(visibility if visibility.hides_within(longest) else ALL, scale, options)
    if ajet_plan is None:  # ordinary rows (`RowForward`)
        sees = None if rule.visibility is ALL else _row_sees(rule.visibility, longest, query_BHND.device)
        return _dense(query_BHND, key_BGND, value_BGND, sees, rule).transpose(1, 2), None
    factor_N1 = query_correction(module, ajet_plan.depth_N)
    if factor_N1 is not None:
        query_BHND = (query_BHND * factor_N1).to(query_BHND.dtype)
    if uses_flex(query_BHND):
        return _flex(query_BHND, key_BGND, value_BGND, ajet_plan, rule), None
    if uses_blocks(key_BGND, value_BGND):
        heads = query_BHND.shape[1]
        query, key, value = (_for_heads(each[0].transpose(0, 1), heads) for each in (query_BHND, key_BGND, value_BGND))
        calls = ajet_plan.calls_for(rule)
        output: Tensor = BlockAttention.apply(query, key, value, rule.sinks_H, calls, scale, rule.softcap)  # type: ignore[no-untyped-call]
        return output[None], None
    return _dense(query_BHND, key_BGND, value_BGND, ajet_plan.sees(rule.visibility), rule).transpose(1, 2), None


def uses_flex(query: Tensor) -> bool:
    """Whether FlexAttention computes this."""
    return query.device.type == "cuda"


def uses_blocks(key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's kernel for CPUs computes this."""
    return key.device.type == "cpu" and key.shape[-1] == value.shape[-1]


def _for_heads(tensor_NGD: Tensor, heads: int) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    groups = heads // tensor_NGD.shape[1]
    return tensor_NGD.repeat_interleave(groups, dim=1) if groups > 1 else tensor_NGD


# ---------------------------------------------------------------- other implementations


def _row_sees(visibility: Visibility, length: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    first: Tensor = visibility.first(places)
    return (places[None] <= places[:, None]) & (places[None] >= first[:, None])


def _dense(query: Tensor, key: Tensor, value: Tensor, sees: Tensor | None, rule: Rule) -> Tensor:
    """Attention with a mask of all pairs; None: plain causal rows."""
    gqa = query.shape[1] != key.shape[1]
    if rule.softcap is None and rule.sinks_H is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, is_causal=sees is None, scale=rule.scale, enable_gqa=gqa
        )
    if sees is None:
        sees = _row_sees(ALL, query.shape[2], query.device)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    added = query.new_zeros(sees.shape).masked_fill_(~sees, float("-inf"))
    output, lse_BHN = attend(query, key, value, added, rule.scale or query.shape[-1] ** -0.5, rule.softcap)
    if rule.sinks_H is not None:
        share_BHN = torch.sigmoid(lse_BHN - rule.sinks_H.to(lse_BHN.dtype)[:, None])
        output = output * share_BHN[..., None].to(output.dtype)
    return output


STRIP = 2048
"""Queries whose pairs with all keys exist at a time, to find out which blocks of a mask hold any."""


def _flex_block_mask(ends_N: Tensor, depth_N: Tensor, visibility: Visibility) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def sees(_batch: Tensor, _head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        first: Tensor = visibility.first(depth_N[asking])
        return (seen <= asking) & (asking < ends_N[seen]) & (depth_N[seen] >= first)

    def sees_from(start: int) -> Any:
        return lambda batch, head, asking, seen: sees(batch, head, asking + start, seen)

    length, device = len(ends_N), str(ends_N.device)
    strips: list[Any] = [
        create_block_mask(sees_from(start), None, None, min(STRIP, length - start), length, device=device)
        for start in range(0, length, STRIP)
    ]
    kinds = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    tables: dict[str, Any] = {kind: torch.cat([getattr(strip, kind) for strip in strips], dim=2) for kind in kinds}
    return BlockMask.from_kv_blocks(
        **tables, BLOCK_SIZE=strips[0].BLOCK_SIZE, mask_mod=sees, seq_lengths=(length, length)
    )


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _flex(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rule: Rule) -> Tensor:
    """As (1, N, H, D)."""
    arguments: dict[str, Any] = {
        "block_mask": plan.flex_mask(rule.visibility),
        "scale": rule.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if rule.softcap is not None:
        arguments["score_mod"] = _bent_by(rule.softcap)
    if rule.sinks_H is None:
        output: Tensor = _run_flex(query, key, value, **arguments)
        return output.transpose(1, 2)
    from torch.nn.attention.flex_attention import AuxRequest

    output, aux = _run_flex(query, key, value, return_aux=AuxRequest(lse=True), **arguments)
    share_1HN = torch.sigmoid(aux.lse - rule.sinks_H.float()[None, :, None])
    return (output * share_1HN[..., None].to(output.dtype)).transpose(1, 2)


def _run_flex(*tensors: Tensor, **arguments: Any) -> Any:
    # once it has seen two scales or caps, the compiler would make them variables, which FlexAttention can't take
    with torch._dynamo.config.patch(specialize_float=True):
        return _compiled_flex()(*tensors, **arguments)


def _bent_by(cap: float) -> Any:
    def bent(score: Tensor, *_where: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return bent


# ---------------------------------------------------------------- layers that keep a state

ROOT = -1
BRANCHING = "GatedDeltaNet"
"""How transformers' names of layers end whose formula for many tokens takes a state to begin with."""


class PackSegment(NamedTuple):
    """Tokens of a pack in which nothing forks."""

    start: int
    end: int
    before: int
    """The segment that it goes on from; ROOT if none."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


def segments_of(ends_N: Indices) -> list[PackSegment]:
    """Cut a pack by the ends of its subtrees. A segment comes after the one that it goes on from."""
    cuts = [0, *(np.flatnonzero(np.diff(ends_N)) + 1).tolist(), len(ends_N)]
    found: list[PackSegment] = []
    for start, end in pairwise(cuts):
        above = np.flatnonzero(ends_N[:start] > start)
        before = ROOT if not len(above) else int(np.searchsorted(cuts, above[-1], side="right")) - 1
        found.append(PackSegment(start, end, before))
    return found


def calls_of(segments: Sequence[PackSegment]) -> list[list[int]]:
    """Which segments are computed together, in this order."""
    forks = {segment.before for segment in segments}
    alone = [[index] for index in range(len(segments)) if index in forks]
    leaves = [index for index in range(len(segments)) if index not in forks]
    together = [[index for index in leaves if (segments[index].before == ROOT) is first] for first in (True, False)]
    return [*alone, *(call for call in together if call)]


class BranchCache(LayerCache):
    """The states of one layer, at the beginning of some segments."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # else a single token's state would be changed in place


def can_branch(model: Any) -> bool:
    """Whether all layers that keep a state can go on from that of a fork."""
    if not any(_branches(module) for module in model.modules()):
        return False
    try:
        return all(_branches(mixer.module) for mixer in mixers_of(model))
    except REFUSALS:  # it can't even be asked
        return False


def _branches(module: Any) -> bool:
    return type(module).__name__.endswith(BRANCHING)


@contextmanager
def branching(model: Any) -> Iterator[None]:
    """Inside (forward *and* backward), layers that can branch compute packs that fork."""
    mixers = mixers_of(model) if any(_branches(module) for module in model.modules()) else []
    with ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(replaced(mixer.module, partial(_mix, mixer.module.forward, mixer)))
        yield


def _mix(own: Any, mixer: Mixer, *inputs: Any, ajet_plan: Any = None, **options: Any) -> Tensor:
    hidden_1NW: Tensor = options["hidden_states"] if "hidden_states" in options else inputs[0]
    if ajet_plan is None:
        output: Tensor = own(*inputs, **options)
        return output
    segments: list[PackSegment] = ajet_plan.segments
    made: dict[int, Tensor] = {}
    states: dict[int, Any] = {}
    for call in calls_of(segments):
        here = [segments[index] for index in call]
        given = [states[segment.before] for segment in here if segment.before != ROOT]
        cache = BranchCache(LayerState.together(given) if given else None)
        rows = [hidden_1NW[0, segment.start : segment.end] for segment in here]
        hidden_BNW = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        output_BNW = own(hidden_BNW, **{mixer.cache: cache})
        for line, (index, segment) in enumerate(zip(call, here, strict=True)):
            made[index] = output_BNW[line, : segment.tokens]
        if len(call) == 1:
            states[call[0]] = cache.state
    return torch.cat([made[index] for index in range(len(segments))])[None]
