"""`Algorithm`: what an optimiser of prompt templates is, and the names of the ready ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ajet.prompt_tuning.search import Search

ALGORITHMS = {
    "apo": "ajet.prompt_tuning.apo->APO",
    "gepa": "ajet.prompt_tuning.gepa->GEPA",
    "best_of": "ajet.prompt_tuning.best_of->BestOf",
}
"""By the name that a YAML uses."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tasks there are to search and to validate with."""

    search: int
    validation: int


class Algorithm(Protocol):
    """Finds better templates by asking a `Search`. It keeps nothing elsewhere: what a later round needs is passed to
    `search.end_round`, and comes back in `search.states` when the run is resumed."""

    rounds: int
    """How many it runs unless told otherwise."""

    def least_episodes(self, sizes: Sizes) -> int:
        """Trials that the start and the first round take at least."""
        ...

    async def run(self, search: Search) -> None:
        """Search until `search.more_rounds` is false. `BudgetExhausted` may pass through."""
        ...
