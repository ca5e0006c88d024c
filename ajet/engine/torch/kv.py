"""Keys and values of computed tokens, within a bounded amount of memory.

Each sequence has one growing place for all layers, so that a row's context lies in one piece: on a CPU, attention over
it then runs at the speed of memory, without gathering blocks first. Places of the same size lie side by side on a
shelf: a step reads the rows of a shelf with one call. Places know what they copied from each other, so a step can read
what several of them hold alike from one of them. Shape legend: L layers, S places of a shelf, H key/value heads,
C capacity in tokens, D head size.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
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
