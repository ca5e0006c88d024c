"""Which prefixes are computed already.

A `Trail` is a run of tokens with the keys and values of its first `computed` ones: of a reply in flight, or left behind
by a finished one. Trails are found by a chain of hashes over blocks of tokens that starts from the policy version, so
what old weights computed can't be found under new ones; the length of the match is then counted token by token, so a
collision of hashes can only cost time. Idle trails are dropped in the order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from ajet.engine.torch.kv import KV

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
