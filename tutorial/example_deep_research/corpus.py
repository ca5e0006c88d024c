"""A small library to search: pages from a JSON Lines file, ranked by BM25. Nothing leaves this machine."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ajet.agents.tools import tool

K1, B = 1.5, 0.75
"""BM25's usual constants: how soon a repeated word stops counting, and how much long pages lose."""
SHOWN = 3
"""Results of a search."""
COMMON = frozenset("a an and the of in on at to is was were who what which when where how by for did does".split())  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the library."""

    id: str
    title: str
    text: str


class Corpus:
    """The pages and their index."""

    def __init__(self, pages: list[Page]) -> None:
        self.pages = {page.id: page for page in pages}
        self._counts = {page.id: Counter(words(f"{page.title} {page.text}")) for page in pages}
        self._lengths = {name: counts.total() for name, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / max(len(pages), 1)
        self._pages_with = Counter(word for counts in self._counts.values() for word in counts)

    def search(self, query: str) -> list[Page]:
        """The pages that fit best, at most `SHOWN`; none if no word of the query is in the library."""
        scores = {name: self._score(name, words(query)) for name in self.pages}
        best = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
        return [self.pages[name] for name in best[:SHOWN]]

    def _score(self, name: str, query: list[str]) -> float:
        total = 0.0
        for word in query:
            count = self._counts[name][word]
            rarity = math.log(1 + (len(self.pages) - self._pages_with[word] + 0.5) / (self._pages_with[word] + 0.5))
            total += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * self._lengths[name] / self._mean))
        return total


def words(text: str) -> list[str]:
    """The words that are searched for."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in COMMON]


@lru_cache
def load(path: str) -> Corpus:
    """The library in a file, read once. Raises ValueError with file and line."""
    pages = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            pages.append(Page(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f'{path}:{number}: expected {{"id", "title", "text"}}: {error}') from None
    return Corpus(pages)


def tools(corpus: Corpus) -> list[Any]:
    """What the searcher may call."""

    @tool
    def search(query: str) -> str:
        """Search the library. Shows the best pages with their ids and first words.

        Args:
            query: A few words.
        """
        found = corpus.search(query)
        return "\n".join(f"[{page.id}] {page.title}: {page.text[:80]} …" for page in found) or "Nothing was found."

    @tool
    def read(page: str) -> str:
        """Read a whole page.

        Args:
            page: Its id, such as p12.
        """
        name = page.strip("[] ")
        if name not in corpus.pages:
            return f"There is no page {name!r}. Search first, and use an id that was shown."
        return f"[{name}] {corpus.pages[name].title}\n{corpus.pages[name].text}"

    return [search, read]
