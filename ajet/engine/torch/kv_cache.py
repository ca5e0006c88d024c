"""Keys and values of computed tokens, within a bounded amount of memory.

Each sequence has one growing place for all layers, so that a row's context lies in one piece: on a CPU, attention over
it then runs at the speed of memory, without gathering blocks first. Places of the same size lie side by side on a
shelf: a step reads the rows of a shelf with one call. Places know what they copied from each other, so a step can read
what several of them hold alike from one of them. Shape legend: L layers, S places of a shelf, H key/value heads,
C capacity in tokens, D head size.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

GRANULE = 64
"""Capacities are multiples of this many tokens."""
GROWTH = 1.5
"""A sequence that outgrows its capacity gets this much more, so that copying costs a constant share."""
SHELF_PLACES = 64
SHELF_TOKENS = 16384
"""A shelf has at most so many places and tokens: one call for many long rows saves nothing, and an idle place costs."""
SHELF_SHARE = 4
"""A new shelf takes at most one part in so many of the room that is left (but at least one place)."""


_origins = count()


class KVShape(NamedTuple):
    """What one token leaves behind."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize


class Shelf:
    """Places of the same capacity. Whatever no sequence has written is zero, so that masked reads are harmless."""

    def __init__(self, shape: KVShape, places: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(shape.layers, places, shape.heads, capacity, size, dtype=dtype, device=device)

        self.keys_LSHCD = zeros(shape.key_size)
        self.values_LSHCD = zeros(shape.value_size)
        self.capacity = capacity
        self.places = places
        self._free = list(range(places))
        self._fresh = [True] * places

    @property
    def tokens(self) -> int:
        return self.places * self.capacity

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def is_empty(self) -> bool:
        return len(self._free) == self.places

    def take(self) -> KV:
        """The first free place: those in use stay close together."""
        place = heapq.heappop(self._free)
        kv = KV(self, place)
        if not self._fresh[place]:
            kv.keys_LHCD.zero_()
            kv.values_LHCD.zero_()
        self._fresh[place] = False
        return kv

    def give_back(self, place: int) -> None:
        heapq.heappush(self._free, place)


class KV:
    """The place of one sequence.

    Tokens of two places that have the same origin are equal to the last bit: one was copied from the other, or both
    from a third, and none of them was written since.
    """

    __slots__ = ("_origins", "keys_LHCD", "lent", "place", "shelf", "values_LHCD")

    def __init__(self, shelf: Shelf, place: int) -> None:
        self.shelf = shelf
        self.place = place
        self.keys_LHCD = shelf.keys_LSHCD[:, place]
        self.values_LHCD = shelf.values_LSHCD[:, place]
        self._origins: list[tuple[int, int]] = [(0, next(_origins))]
        """(start, origin): of the tokens from there to the next start."""
        self.lent = 0
        """So many tokens from the start may be held by other places, too."""

    @property
    def capacity(self) -> int:
        return self.shelf.capacity

    def copy_prefix(self, source: KV, length: int) -> None:
        """Take over the first `length` tokens of another sequence."""
        self.keys_LHCD[:, :, :length] = source.keys_LHCD[:, :, :length]
        self.values_LHCD[:, :, :length] = source.values_LHCD[:, :, :length]
        self._origins = source._origins_before(length)
        self._origins.append((length, next(_origins)))
        self.lent = length
        source.lent = max(source.lent, length)

    def write_from(self, start: int) -> None:
        """Tokens from `start` on are about to be written: what others hold of them is no longer what is here."""
        if start < self.lent:
            self._origins = self._origins_before(start)
            self._origins.append((start, next(_origins)))
            self.lent = start

    def shared_until(self, length: int) -> Iterator[tuple[int, int]]:
        """(origin, end) of what others may hold of the first `length` tokens.

        Whoever has one of these origins holds the same tokens from 0 to the smaller one of the two ends.
        """
        end = min(self.lent, length)
        for start, origin in reversed(self._origins):
            if start < end:
                yield origin, end
                end = start

    def _origins_before(self, length: int) -> list[tuple[int, int]]:
        return [stretch for stretch in self._origins if stretch[0] < length]


class KVPool:
    """Hands out places until shelves for `max_tokens` are in use."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, max_tokens: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.max_tokens = max_tokens
        self.used_tokens = 0
        """Of all shelves, free places included."""
        self.peak_tokens = 0
        self._shelves: dict[int, list[Shelf]] = {}
        """By capacity: those with a free place."""

    def allocate(self, tokens: int, limit: int) -> KV | None:
        """A place for `tokens` (at most `limit`) tokens; None if the pool is too full."""
        capacity = min(_rounded(tokens), limit)
        shelf = self._open_shelf(capacity, capacity) or self._new_shelf(capacity) or self._open_shelf(capacity, limit)
        if shelf is None:
            return None
        kv = shelf.take()
        if shelf.is_full:
            self._shelves[shelf.capacity].remove(shelf)
        return kv

    def _open_shelf(self, smallest: int, largest: int) -> Shelf | None:
        """The first one with a free place of a suitable size."""
        sizes = sorted(size for size, shelves in self._shelves.items() if shelves and smallest <= size <= largest)
        return self._shelves[sizes[0]][0] if sizes else None

    def _new_shelf(self, capacity: int) -> Shelf | None:
        room = (self.max_tokens - self.used_tokens) // capacity
        if room < 1:
            return None
        places = max(1, min(SHELF_PLACES, SHELF_TOKENS // capacity, room // SHELF_SHARE))
        shelf = Shelf(self.shape, places, capacity, dtype=self.dtype, device=self.device)
        self._shelves.setdefault(capacity, []).append(shelf)
        self.used_tokens += shelf.tokens
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        return shelf

    def release(self, kv: KV) -> None:
        """Give a place back; nobody may use it afterwards. A shelf whose last place comes back is given up."""
        shelf = kv.shelf
        open_shelves = self._shelves[shelf.capacity]
        if shelf.is_full:
            open_shelves.append(shelf)
        shelf.give_back(kv.place)
        if shelf.is_empty:
            open_shelves.remove(shelf)
            self.used_tokens -= shelf.tokens

    def grown(self, kv: KV, tokens: int, used: int, limit: int) -> KV | None:
        """A larger place with the same first `used` tokens; None if the pool is too full (the old one stays valid)."""
        larger = self.allocate(max(tokens, int(kv.capacity * GROWTH)), limit) or self.allocate(tokens, limit)
        if larger is not None:
            larger.copy_prefix(kv, used)
            self.release(kv)
        return larger

    def bytes(self, tokens: int) -> int:
        return tokens * self.shape.bytes_per_token(self.dtype)


def _rounded(tokens: int) -> int:
    """Up to a multiple of `GRANULE`; for many tokens, of an eighth of their number: few sizes share their shelves."""
    step = max(GRANULE, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


BLOCK = 16
"""Tokens a hash covers: shorter prefixes are not worth finding."""
CANDIDATES = 32
"""How many of the trails that share the deepest block are compared: more than a group has members."""


@dataclass(slots=True, eq=False)
class Trail:
    """Tokens, and how many of them are computed."""

    tokens: list[int]
    kv: KV | None = None
    computed: int = 0
    reusable: int | None = None
    """Of the computed tokens, how many may serve others; None: all. Deterministic mode lends whole chunks only."""
    hashes: list[int] = field(default_factory=list)

    @property
    def lendable(self) -> int:
        return self.computed if self.reusable is None else min(self.computed, self.reusable)


class Match(NamedTuple):
    """The trail that shares most with a prompt, and how many tokens that is."""

    trail: Trail
    length: int


class PrefixCache:
    """Finds trails by their tokens, and remembers the idle ones."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._by_block: dict[int, dict[Trail, None]] = {}
        self._idle: OrderedDict[Trail, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def find(self, tokens: list[int]) -> Match | None:
        """The trail with the longest common prefix, idle or in flight, whether computed yet or not."""
        holders: dict[Trail, None] = {}
        chained = hash(("version", self._version))
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chained = hash((chained, tuple(tokens[start : start + BLOCK])))
            deeper = self._by_block.get(chained)
            if deeper is None:
                break
            holders = deeper
        best: Match | None = None
        for trail in list(reversed(holders))[:CANDIDATES]:
            match = Match(trail, common_prefix(trail.tokens, tokens))
            if best is None or (match.length, trail.lendable) > (best.length, best.trail.lendable):
                best = match
        return best

    def register(self, trail: Trail) -> None:
        """Make the whole blocks of a trail's tokens findable; call again when it has grown."""
        tokens, hashes = trail.tokens, trail.hashes
        while len(tokens) >= (len(hashes) + 1) * BLOCK:
            start = len(hashes) * BLOCK
            before = hashes[-1] if hashes else hash(("version", self._version))
            chained = hash((before, tuple(tokens[start : start + BLOCK])))
            hashes.append(chained)
            self._by_block.setdefault(chained, {})[trail] = None

    def forget(self, trail: Trail) -> None:
        """Make a trail unfindable. Its storage is the caller's to release."""
        for chained in trail.hashes:
            holders = self._by_block[chained]
            del holders[trail]
            if not holders:
                del self._by_block[chained]
        trail.hashes.clear()
        self._idle.pop(trail, None)

    def retire(self, trail: Trail) -> None:
        """Its reply is finished: keep it until memory is needed."""
        self._idle[trail] = None

    def is_idle(self, trail: Trail) -> bool:
        return trail in self._idle

    def touch(self, trail: Trail) -> None:
        """It was of use just now."""
        if trail in self._idle:
            self._idle.move_to_end(trail)

    def oldest(self, besides: Trail | None = None) -> Trail | None:
        """The idle trail that was of no use for the longest time."""
        return next((trail for trail in self._idle if trail is not besides), None)

    def start_version(self, version: int) -> list[Trail]:
        """New weights: nothing cached is found any more. Returns the idle trails, for their storage."""
        idle = list(self._idle)
        for holders in self._by_block.values():
            for trail in holders:
                trail.hashes = []
        self._by_block.clear()
        self._idle.clear()
        self._version = version
        return idle


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many tokens two lists share from the start."""
    end = min(len(left), len(right))
    start = 0
    while start < end and left[start : start + BLOCK] == right[start : start + BLOCK]:
        start += BLOCK
    start = min(start, end)
    while start < end and left[start] == right[start]:
        start += 1
    return start
