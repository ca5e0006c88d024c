"""Keys and values of computed tokens, within a bounded amount of memory.

Each sequence has one growing pair of tensors for all layers, so that a row's context lies in one piece: on a CPU,
attention over it then runs at the speed of memory, without gathering blocks first. Shape legend: L layers, H key/value
heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GRANULE = 64
"""Capacities are multiples of this many tokens."""
GROWTH = 1.5
"""A sequence that outgrows its capacity gets this much more, so that copying costs a constant share."""


class KVShape(NamedTuple):
    """What one token leaves behind."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize


@dataclass(slots=True)
class KV:
    """The storage of one sequence."""

    keys_LHCD: torch.Tensor
    values_LHCD: torch.Tensor

    @property
    def capacity(self) -> int:
        return int(self.keys_LHCD.shape[2])

    def copy_prefix(self, source: KV, length: int) -> None:
        """Take over the first `length` tokens of another sequence."""
        self.keys_LHCD[:, :, :length] = source.keys_LHCD[:, :, :length]
        self.values_LHCD[:, :, :length] = source.values_LHCD[:, :, :length]


class KVPool:
    """Hands out storage until `max_tokens` are in use."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, max_tokens: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.max_tokens = max_tokens
        self.used_tokens = 0
        self.peak_tokens = 0

    def allocate(self, tokens: int, limit: int) -> KV | None:
        """Storage for `tokens` (at most `limit`) tokens; None if the pool is too full."""
        capacity = min(-(-tokens // GRANULE) * GRANULE, limit)
        if self.used_tokens + capacity > self.max_tokens:
            return None
        shape = self.shape
        kv = KV(
            torch.empty(shape.layers, shape.heads, capacity, shape.key_size, dtype=self.dtype, device=self.device),
            torch.empty(shape.layers, shape.heads, capacity, shape.value_size, dtype=self.dtype, device=self.device),
        )
        self.used_tokens += capacity
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        return kv

    def release(self, kv: KV) -> None:
        """Give storage back; nobody may use it afterwards."""
        self.used_tokens -= kv.capacity

    def grown(self, kv: KV, tokens: int, used: int, limit: int) -> KV | None:
        """Larger storage with the same first `used` tokens; None if the pool is too full (the old one stays valid)."""
        larger = self.allocate(max(tokens, int(kv.capacity * GROWTH)), limit) or self.allocate(tokens, limit)
        if larger is not None:
            larger.copy_prefix(kv, used)
            self.release(kv)
        return larger

    def bytes(self, tokens: int) -> int:
        return tokens * self.shape.bytes_per_token(self.dtype)
