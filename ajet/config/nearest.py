"""`nearest`: which of the present names was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, present: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `present`, if any is similar enough; case and `-` or `_` make no difference."""
    folded = {key.lower().replace("-", "_"): key for key in reversed(list(present))}
    found = get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None
