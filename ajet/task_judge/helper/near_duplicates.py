"""`NearDuplicates`: which texts say nearly the same, by their words alone; no embedding model, and nothing is guessed.

Two texts are near duplicates if the words and word pairs they share are at least `threshold` of all they have, and they
hold the same numbers: `What is 3 + 4?` and `What is 3 + 5?` are two tasks. The answer is exact, not estimated.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from itertools import pairwise

WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W\d_]+|\d+(?:[.,]\d+)*")
"""A word, a number, or one character of a script without spaces."""


class NearDuplicates:
    """Texts seen so far. `add` says whether a new one repeats one of them."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: from 0 (all texts with the same numbers are alike) to 1 (all words are the same)."""
        self.threshold = threshold
        self._texts: list[tuple[frozenset[int], tuple[str, ...]]] = []
        self._index: dict[int, list[int]] = defaultdict(list)

    def find(self, text: str) -> int | None:
        """The number of the first text that this one repeats; None if it is new."""
        features, numbers = _features(text)
        candidates = {number for feature in self._prefix(features) for number in self._index.get(feature, ())}
        for number in sorted(candidates):
            other, other_numbers = self._texts[number]
            if numbers == other_numbers and _overlap(features, other) >= self.threshold:
                return number
        return None

    def add(self, text: str) -> int | None:
        """`find`; a text that is new is remembered, under the next number from 0."""
        found = self.find(text)
        if found is None:
            features, numbers = _features(text)
            for feature in self._prefix(features):
                self._index[feature].append(len(self._texts))
            self._texts.append((features, numbers))
        return found

    def _prefix(self, features: frozenset[int]) -> list[int]:
        """Features of which two texts must share one to be alike: the first few, in an order common to all texts."""
        length = len(features) - math.ceil(self.threshold * len(features) - 1e-9) + 1
        return sorted(features)[: max(1, min(length, len(features)))]


def _overlap(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other)


def _features(text: str) -> tuple[frozenset[int], tuple[str, ...]]:
    """Words and pairs of neighbours as hashes, and the numbers in order."""
    words = WORD.findall(text.casefold())
    grams = {*words, *(f"{left} {right}" for left, right in pairwise(words))} or {text.strip()}
    numbers = tuple(word for word in words if word[0].isdigit())
    return frozenset(_hash(gram) for gram in grams), numbers


def _hash(gram: str) -> int:
    return int.from_bytes(hashlib.blake2b(gram.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
