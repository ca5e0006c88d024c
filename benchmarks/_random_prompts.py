"""The control of `prompt_tuning.py`: rewrites of the first templates, each by itself, until the budget is spent."""

from __future__ import annotations

from ajet.prompt_tuning import Purpose, Search, Sizes
from ajet.prompt_tuning.proposal import Ask, Kind

PROPOSALS = 4


class RandomSearch:
    """No episode is read, and nothing is built on what was found: each rewrite starts from the first templates."""

    rounds = 3

    def least_episodes(self, sizes: Sizes) -> int:
        return 2 * sizes.validation

    async def run(self, search: Search) -> None:
        await search.validate(search.start)
        while search.more_rounds:
            number = search.begin_round()
            names = search.names_of_round(number)
            first = number * PROPOSALS
            asks = [Ask(Kind.REWRITE, search.start, names, draw=first + index) for index in range(PROPOSALS)]
            for candidate in search.admit(await search.draft(asks)):
                search.consider((await search.score([candidate], search.validation_tasks, Purpose.VALIDATION))[0])
            await search.end_round()
