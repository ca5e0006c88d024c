"""The KV cache: stores the keys and values of computed tokens, and finds prefixes that are computed already.

Each sequence has one slot for all layers, which grows with it, so a row's context is contiguous: on a CPU, attention
then runs at the speed of memory, without gathering blocks first. Slots of the same size lie side by side in a slab, and
a step reads the rows of a slab with one call. Slots know what they copied from each other, so a step can read what
several of them have in common from one of them. Memory is bounded (`KVPool`).

`PrefixCache` finds sequences by a chain of hashes over blocks of tokens. New weights empty it. The length of a match is
then counted token by token, so a hash collision only costs time. Idle sequences are dropped in the order of their last
use.

Shapes: L layers, S slots of a slab, H key/value heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch

GRANULE = 64
"""Capacities are multiples of this many tokens."""
GROWTH = 1.5
"""The factor by which a slot grows, so that copying stays a constant share of the work."""
SLAB_SLOTS = 64
SLAB_TOKENS = 16384
"""Limits of a slab: sharing a call saves nothing for many long rows, and idle slots cost memory."""
SLAB_SHARE = 4
"""A new slab takes at most this fraction (1/n) of the room that is left, but at least one slot."""


_origins = count()


STATES = 2
"""The states that memory is counted for, of each sequence: at its end, and at the end of its prompt."""


class KVShape(NamedTuple):
    """The shape of what is stored per token, and what is stored per sequence."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    state_bytes: int = 0
    """The states of the layers that keep one from token to token, at one position."""

    @property
    def kept_bytes(self) -> int:
        """How much one sequence's states take."""
        return STATES * self.state_bytes

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize

    def conversation_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """How much the keys, values and states of a conversation take."""
        return self.bytes_per_token(dtype) * tokens + self.kept_bytes

    def state_tokens(self, dtype: torch.dtype) -> int:
        """How many tokens' keys and values take as much memory as a sequence's states."""
        return -(-self.kept_bytes // self.bytes_per_token(dtype))


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one mixer, of one or several sequences (first dimension)."""

    tensors: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """What its convolution saw last ("conv"), and what its recurrence holds ("recurrent"), each by the number that
    transformers gives it."""

    @classmethod
    def together(cls, states: list[LayerState]) -> LayerState:
        """A copy, as mixers write into it."""
        return cls({key: torch.cat([state.tensors[key] for state in states]) for key in states[0].tensors})

    def of(self, index: int) -> LayerState:
        """One sequence's part."""
        return LayerState({key: each[index : index + 1] for key, each in self.tensors.items()})

    def alone(self) -> LayerState:
        """The same without the memory of the batch that it was computed in."""
        return LayerState({key: each.clone() for key, each in self.tensors.items()})

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors.values())


class Slab:
    """Slots of the same capacity. Whatever no sequence has written is zero, so masked reads are harmless."""

    def __init__(self, shape: KVShape, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(shape.layers, slots, shape.heads, capacity, size, dtype=dtype, device=device)

        self.keys_LSHCD = zeros(shape.key_size)
        self.values_LSHCD = zeros(shape.value_size)
        self.capacity = capacity
        self.slots = slots
        self.tokens = slots * (capacity + shape.state_tokens(dtype))
        """The memory it takes, in tokens."""
        self._free = list(range(slots))
        self._fresh = [True] * slots

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_empty(self) -> bool:
        return len(self._free) == self.slots

    def take(self) -> KV:
        """The first free slot, so that used slots stay close together."""
        slot = heapq.heappop(self._free)
        kv = KV(self, slot)
        if not self._fresh[slot]:
            kv.keys_LHCD.zero_()
            kv.values_LHCD.zero_()
        self._fresh[slot] = False
        return kv

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


class KV:
    """The slot of one sequence.

    Tokens of two slots with the same origin are equal to the last bit: one was copied from the other, or both from a
    third, and none of them has been written since.
    """

    __slots__ = ("_origins", "experts", "keep_at", "keys_LHCD", "lent", "slab", "slot", "states", "values_LHCD")

    def __init__(self, slab: Slab, slot: int) -> None:
        self.slab = slab
        self.slot = slot
        self.keys_LHCD = slab.keys_LSHCD[:, slot]
        self.values_LHCD = slab.values_LSHCD[:, slot]
        self._origins: list[tuple[int, int]] = [(0, next(_origins))]
        """(start, origin) of the tokens from `start` to the next start."""
        self.lent = 0
        """How many tokens from the start may be in other slots, too."""
        self.states: dict[int, list[LayerState]] = {}
        """By number of tokens, what the layers that keep a state had after them."""
        self.keep_at = 0
        """The position whose states are kept when the sequence goes on."""
        self.experts: list[Any] = []
        """Those of each computed token, if they are noted: [layers, chosen]."""

    @property
    def capacity(self) -> int:
        return self.slab.capacity

    def copy_prefix(self, source: KV, length: int) -> None:
        """Copy the first `length` tokens of another sequence."""
        self.keys_LHCD[:, :, :length] = source.keys_LHCD[:, :, :length]
        self.values_LHCD[:, :, :length] = source.values_LHCD[:, :, :length]
        self._origins = source._origins_before(length)
        self._origins.append((length, next(_origins)))
        self.states = {position: states for position, states in source.states.items() if position <= length}
        self.experts = source.experts[:length]
        self.lent = length
        source.lent = max(source.lent, length)

    def take_states(self, before: int, after: int, states: list[LayerState]) -> None:
        """The tokens from `before` to `after` are computed. What came before goes, unless it is to be kept."""
        if before == 0:
            self.states.clear()  # what older weights left
        elif before != self.keep_at:
            del self.states[before]
        self.states[after] = [state.alone() for state in states] if after == self.keep_at else states

    def take_experts(self, before: int, experts: Iterable[Any]) -> None:
        """Take those of the computed tokens from `before` on."""
        self.experts[before:] = experts

    def last_state(self, length: int) -> int:
        """The last position, up to `length`, whose states are there; 0 if there are none."""
        return max((position for position in self.states if position <= length), default=0)

    def go_on_from(self, start: int, keep_at: int) -> None:
        """A sequence continues after `start` tokens, and will keep its states at another position."""
        self.states = {position: states for position, states in self.states.items() if position == start}
        self.keep_at = keep_at

    def settle(self) -> None:
        """The sequence is idle: its states must not hold the memory of the batch that they were computed in."""
        self.states = {position: [each.alone() for each in states] for position, states in self.states.items()}

    def write_from(self, start: int) -> None:
        """Tokens from `start` on are about to be overwritten: they will differ from other slots' copies."""
        if start < self.lent:
            self._origins = self._origins_before(start)
            self._origins.append((start, next(_origins)))
            self.lent = start

    def shared_until(self, length: int) -> Iterator[tuple[int, int]]:
        """(origin, end) of what other slots may hold of the first `length` tokens.

        A slot with one of these origins holds the same tokens from 0 up to the smaller of the two ends.
        """
        end = min(self.lent, length)
        for start, origin in reversed(self._origins):
            if start < end:
                yield origin, end
                end = start

    def _origins_before(self, length: int) -> list[tuple[int, int]]:
        return [(start, origin) for start, origin in self._origins if start < length]


class KVPool:
    """Hands out slots, from slabs of at most `max_tokens` tokens altogether."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, max_tokens: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.max_tokens = max_tokens
        self.state_tokens = shape.state_tokens(dtype)
        self.used_tokens = 0
        """In all slabs, free slots included."""
        self.peak_tokens = 0
        self._slabs: dict[int, list[Slab]] = {}
        """Those with a free slot, by capacity."""

    def allocate(self, tokens: int, limit: int) -> KV | None:
        """A slot for `tokens` tokens (at most `limit`); None if the pool is too full."""
        capacity = min(_rounded(tokens), limit)
        slab = self._open_slab(capacity, capacity) or self._new_slab(capacity) or self._open_slab(capacity, limit)
        if slab is None:
            return None
        kv = slab.take()
        if slab.is_full:
            self._slabs[slab.capacity].remove(slab)
        return kv

    def _open_slab(self, smallest: int, largest: int) -> Slab | None:
        """The first slab with a free slot of a suitable size."""
        sizes = sorted(size for size, slabs in self._slabs.items() if slabs and smallest <= size <= largest)
        return self._slabs[sizes[0]][0] if sizes else None

    def _new_slab(self, capacity: int) -> Slab | None:
        room = (self.max_tokens - self.used_tokens) // (capacity + self.state_tokens)
        if room < 1:
            return None
        slots = max(1, min(SLAB_SLOTS, SLAB_TOKENS // capacity, room // SLAB_SHARE))
        slab = Slab(self.shape, slots, capacity, dtype=self.dtype, device=self.device)
        self._slabs.setdefault(capacity, []).append(slab)
        self.used_tokens += slab.tokens
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        return slab

    def release(self, kv: KV) -> None:
        """Give a slot back; nobody may use it afterwards. A slab without used slots is freed."""
        slab = kv.slab
        open_slabs = self._slabs[slab.capacity]
        if slab.is_full:
            open_slabs.append(slab)
        slab.give_back(kv.slot)
        if slab.is_empty:
            open_slabs.remove(slab)
            self.used_tokens -= slab.tokens

    def grown(self, kv: KV, tokens: int, used: int, limit: int) -> KV | None:
        """A larger slot with the same first `used` tokens; None if the pool is too full: the old one stays valid."""
        larger = self.allocate(max(tokens, int(kv.capacity * GROWTH)), limit) or self.allocate(tokens, limit)
        if larger is not None:
            larger.copy_prefix(kv, used)
            larger.keep_at = kv.keep_at
            self.release(kv)
        return larger


def _rounded(tokens: int) -> int:
    """Rounded up to a multiple of `GRANULE`, or about an eighth for many tokens, so that few sizes share slabs."""
    step = max(GRANULE, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


BLOCK = 16
"""Tokens per hash: shorter prefixes aren't worth finding."""
CANDIDATES = 32
"""How many sequences that share the deepest block are compared: more than a group has episodes."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and the keys and values of the first `computed` ones: of a reply in flight, or left by a finished one."""

    tokens: list[int]
    kv: KV | None = None
    computed: int = 0
    reusable: int | None = None
    """How many of the computed tokens others may use; None: all. Deterministic mode lends only whole chunks."""
    hashes: list[int] = field(default_factory=list)

    @property
    def lendable(self) -> int:
        return self.computed if self.reusable is None else min(self.computed, self.reusable)

    def lends(self, length: int, stateful: bool) -> int:
        """How many of the first `length` tokens others may use now: with states, only up to where some are kept."""
        most = min(length, self.lendable)
        if not stateful:
            return most
        return 0 if self.kv is None else self.kv.last_state(most)


class Match(NamedTuple):
    """The sequence that shares most with a prompt, and how many tokens they share."""

    sequence: Sequence
    length: int


class PrefixCache:
    """Finds sequences by their tokens, and keeps the idle ones."""

    def __init__(self, *, stateful: bool = False) -> None:
        self._stateful = stateful
        self._by_block: dict[int, dict[Sequence, None]] = {}
        self._idle: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def find(self, tokens: list[int]) -> Match | None:
        """The sequence with the longest common prefix, idle or in flight, computed yet or not."""
        holders: dict[Sequence, None] = {}
        chained = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chained = hash((chained, tuple(tokens[start : start + BLOCK])))
            deeper = self._by_block.get(chained)
            if deeper is None:
                break
            holders = deeper
        best: Match | None = None
        best_rank = (0, 0)
        for sequence in list(reversed(holders))[:CANDIDATES]:
            match = Match(sequence, common_prefix(sequence.tokens, tokens))
            rank = match.length, sequence.lends(match.length, self._stateful)
            if best is None or rank > best_rank:
                best, best_rank = match, rank
        return best

    def register(self, sequence: Sequence) -> None:
        """Make a sequence findable by its whole blocks; call again when it has grown."""
        tokens, hashes = sequence.tokens, sequence.hashes
        while len(tokens) >= (len(hashes) + 1) * BLOCK:
            start = len(hashes) * BLOCK
            before = hashes[-1] if hashes else 0
            chained = hash((before, tuple(tokens[start : start + BLOCK])))
            hashes.append(chained)
            self._by_block.setdefault(chained, {})[sequence] = None

    def forget(self, sequence: Sequence) -> None:
        """Make a sequence unfindable. The caller releases its storage."""
        for chained in sequence.hashes:
            holders = self._by_block[chained]
            del holders[sequence]
            if not holders:
                del self._by_block[chained]
        sequence.hashes.clear()
        self._idle.pop(sequence, None)

    def retire(self, sequence: Sequence) -> None:
        """The sequence's reply is finished: keep it until memory is needed."""
        if sequence.kv is not None:
            sequence.kv.settle()
        self._idle[sequence] = None

    def is_idle(self, sequence: Sequence) -> bool:
        return sequence in self._idle

    def touch(self, sequence: Sequence) -> None:
        """Note that the sequence has just been used."""
        if sequence in self._idle:
            self._idle.move_to_end(sequence)

    def oldest(self, besides: Sequence | None = None) -> Sequence | None:
        """The least recently used idle sequence."""
        return next((sequence for sequence in self._idle if sequence is not besides), None)

    def clear(self) -> list[Sequence]:
        """New weights: nothing cached is found any more. Returns the idle sequences, whose storage can be released."""
        idle = list(self._idle)
        for holders in self._by_block.values():
            for sequence in holders:
                sequence.hashes = []
        self._by_block.clear()
        self._idle.clear()
        return idle


def common_prefix(left: list[int], right: list[int]) -> int:
    """The length of the common prefix of two lists."""
    end = min(len(left), len(right))
    start = 0
    while start < end and left[start : start + BLOCK] == right[start : start + BLOCK]:
        start += BLOCK
    start = min(start, end)
    while start < end and left[start] == right[start]:
        start += 1
    return start
