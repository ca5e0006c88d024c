"""Attention over the engine's own keys and values, through transformers' public attention interface.

All tokens of a step, from all sequences, go through the model as one row. Each attention layer passes us queries, keys
and values; the step's `StepLayout` knows which tokens belong to which sequence, stores the new keys and values there,
and attends within each. A sequence with one new token (a reply being drawn) is a *row*, one with more is a *chunk*.

On a CPU, attention costs as much as it reads, plus a fixed cost per call. So rows and short chunks of a slab share a
call (`PassBatch`). And tokens that many sequences have in common, copied from one slot, are read from that slot for all
of them at once (`Prefix`), and joined with what each has of its own.

Each layer reads by its own `Rule`: its window or chunks, soft cap and sinks.

Shapes: those of `readers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from ajet.engine.attention_rules import ALL, Rule, Visibility, query_correction
from ajet.engine.torch.readers import (
    ALIGN,
    LongChunk,
    Member,
    New,
    PassBatch,
    PassPart,
    Prefix,
    Read,
    Singles,
    can_join,
)

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


class StepLayout:
    """Where the tokens of one step belong: first those of the rows, then those of the chunks, in the given order.

    `visibility` is that of each layer that attends; without, all see everything before. With `apart`, every part is
    read by itself: its result is then independent of what else is in the step.
    """

    def __init__(
        self,
        rows: list[PassPart],
        chunks: list[PassPart],
        visibility: Sequence[Visibility] = (),
        *,
        apart: bool = False,
    ) -> None:
        self.visibility = visibility
        self._attended = 0
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

    @cached_property
    def positions(self) -> list[int]:
        """The position of each token in its sequence."""
        return [position for part, _ in self.members for position in range(part.context, part.end)]

    def next_layer(self) -> int:
        """The number of the layer that attends now. They count in the order in which they run: some models have layers
        between them that don't attend, or run one attention module in several places."""
        self._attended += 1
        return self._attended - 1

    def rule(self, layer: int, scaling: float | None, options: dict[str, Any]) -> Rule:
        """The rule of a layer in this step: a window that cuts nothing off is none."""
        visibility = self.visibility[layer] if self.visibility else ALL
        return Rule.of(visibility if visibility.hides_within(self.longest) else ALL, scaling, options)

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Store the new keys and values, and return what each token read, as (1, T, H, D)."""
        heads, tokens = query_1HTD.shape[1:3]
        new = New.of(query_1HTD, key_1KTD, value_1KTD)
        joins = rule.visibility is ALL and rule.softcap is None and can_join(query_1HTD, value_1KTD)
        plan = self.sharing if joins else self.plain
        values_TKGD = query_1HTD.new_zeros(*new.query_TKGD.shape[:3], value_1KTD.shape[-1])
        lse_TKG = None
        if plan.prefixes or rule.sinks_H is not None:
            lse_TKG = values_TKGD.new_zeros(values_TKGD.shape[:3], dtype=torch.float32)
        read = Read(values_TKGD, lse_TKG)
        for reader in plan.readers:
            reader.read(layer, new, read, rule)
        for prefix in plan.prefixes:
            prefix.join(layer, new, read, rule)
        if rule.sinks_H is not None and lse_TKG is not None:
            share_TKG = torch.sigmoid(lse_TKG - rule.sinks_H.float().view(lse_TKG.shape[1:]))
            values_TKGD = values_TKGD * share_TKG[..., None].to(values_TKGD.dtype)
        return values_TKGD.view(1, tokens, heads, -1)


class LayerPlan(NamedTuple):
    """The calls of one layer. What the readers read is joined with the prefixes."""

    readers: list[PassBatch | Singles | LongChunk]
    prefixes: list[Prefix]

    @classmethod
    def apart(cls, members: list[Member]) -> LayerPlan:
        rows, chunks = _split(members, 1)
        readers: list[PassBatch | Singles | LongChunk] = [Singles(rows, 0)] if rows else []
        return cls([*readers, *map(LongChunk, chunks)], [])

    @classmethod
    def together(cls, members: list[Member], skip: int = 0) -> LayerPlan:
        """Parts of a slab in one call where that pays. They leave out the first `skip` tokens."""
        short, long = _split(members, SHORT)
        readers: list[PassBatch | Singles | LongChunk] = []
        singles: list[Member] = []
        for alike in _alike(short):
            if worth_one_call(alike, skip):
                readers.append(PassBatch(alike, skip))
            elif alike[0].part.count == 1:
                singles += alike
            else:
                readers += [PassBatch([member], skip) for member in alike]
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
    """Split rows into those with up to `largest` new tokens and those with more."""
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
    """Choose how much of a prefix to share, of which rows hold more or less. Returns the savings per holder, the best
    length, and its holders."""
    ends = sorted(ends, key=_END, reverse=True)
    saved, number = max(((end * index - PREFIX_TOKENS) / (index + 1), index + 1) for index, (end, _) in enumerate(ends))
    return saved, ends[number - 1][0], [member for _, member in ends[:number]]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: StepLayout,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer. `layout` arrives through the model's keyword arguments: that
    they come here is seen when the model's layers are asked for their rules."""
    layer = layout.next_layer()
    if getattr(module, "attn_temperature_tuning", False):
        query = _corrected(module, query, layout.positions)
    return layout.attend(layer, query, key, value, layout.rule(layer, scaling, options)), None


def _corrected(module: torch.nn.Module, query_1HTD: torch.Tensor, positions: list[int]) -> torch.Tensor:
    padding = [0] * (query_1HTD.shape[2] - len(positions))
    factor_T1 = query_correction(module, torch.tensor(positions + padding, device=query_1HTD.device))
    return query_1HTD if factor_T1 is None else (query_1HTD * factor_T1).to(query_1HTD.dtype)


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
