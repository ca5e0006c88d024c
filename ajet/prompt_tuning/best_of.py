"""`BestOf`: rewrite the best templates several times without looking at any episode, and keep what scores higher.

The baseline: what reading episodes is worth is what APO and GEPA gain over it with the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from ajet.prompt_tuning.proposal import Ask, Kind
from ajet.prompt_tuning.search import Search, Sizes
from ajet.prompt_tuning.trial import Purpose


@dataclass(frozen=True, slots=True)
class BestOf:
    """Each round: `proposals` rewrites of the best so far, each scored on all validation tasks."""

    proposals: int = 4
    rounds: int = 3

    def least_episodes(self, sizes: Sizes) -> int:
        return 2 * sizes.validation

    async def run(self, search: Search) -> None:
        await search.validate(search.start)
        while search.more_rounds:
            number = search.begin_round()
            names = search.names_of_round(number)
            asks = [Ask(Kind.REWRITE, search.best, names, draw=index) for index in range(self.proposals)]
            for candidate in search.admit(await search.draft(asks)):
                search.consider((await search.score([candidate], search.validation_tasks, Purpose.VALIDATION))[0])
            await search.end_round()
