"""`APO`: criticise episodes, edit the templates by the criticism, and keep a beam of the best (text gradients).

One round:

1. Each parent of the beam is tried on `branch_factor` batches of `critique_batch` search tasks. If the beam has fewer
   than `beam_width` members, its members take several turns.
2. The proposer criticises the parent from each batch's episodes; a second question turns each criticism into an edit.
3. The old beam and the edits are tried on one batch of `score_batch` validation tasks, the same for all. The best
   `beam_width` stay.
4. The first of the beam is tried on all validation tasks. If it is strictly better than the best so far, it becomes it.

Calls in a round: `beam_width × branch_factor` criticisms and as many edits; episodes in the first:
`beam_width × branch_factor × critique_batch + (1 + beam_width × branch_factor) × score_batch + validation tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from ajet.prompt_tuning.proposal import Ask, Candidate, Kind
from ajet.prompt_tuning.search import Search, Sizes
from ajet.prompt_tuning.trial import Purpose, common_means
from ajet.schema.errors import concurrently


@dataclass(frozen=True, slots=True)
class APO:
    """Automatic prompt optimisation with text gradients and beam search."""

    beam_width: int = 4
    branch_factor: int = 4
    critique_batch: int = 4
    score_batch: int = 16
    rounds: int = 3

    def least_episodes(self, sizes: Sizes) -> int:
        branches = self.beam_width * self.branch_factor
        reading = branches * min(self.critique_batch, sizes.search)
        scoring = (1 + branches) * min(self.score_batch, sizes.validation)
        return sizes.validation + reading + scoring + sizes.validation

    async def run(self, search: Search) -> None:
        await search.validate(search.start)
        beam = [search.candidates[name] for name in search.states[-1]["beam"]] if search.states else [search.start]
        while search.more_rounds:
            search.begin_round()
            fresh = await self._branch(search, self._parents(search, beam))
            beam = await self._select(search, beam, fresh)
            search.consider(await search.validate(beam[0]))
            await search.end_round({"beam": [candidate.id for candidate in beam]})

    def _parents(self, search: Search, beam: Sequence[Candidate]) -> list[Candidate]:
        """`beam_width` of them; each of a smaller beam as often as the others, or once more."""
        if len(beam) >= self.beam_width:
            return search.random.sample(beam, self.beam_width)
        return list(islice(cycle(beam), self.beam_width))

    async def _branch(self, search: Search, parents: Sequence[Candidate]) -> list[Candidate]:
        """The edits of all branches that came to something."""
        names = search.names_of_round(search.round)
        branches = [parent for parent in parents for _ in range(self.branch_factor)]
        size = min(self.critique_batch, len(search.search_tasks))
        search.check_budget(len(branches) * size)  # before any begins: they don't see what the others take
        batches = [search.random.sample(search.search_tasks, size) for _ in branches]
        asks = await concurrently(
            self._read(search, parent, names, tasks, draw)
            for draw, (parent, tasks) in enumerate(zip(branches, batches, strict=True))
        )
        critiques = await search.critique(asks)
        edits = [
            replace(ask, kind=Kind.EDIT, trials=(), source=ask.trials, feedback=critique)
            for ask, critique in zip(asks, critiques, strict=True)
            if critique is not None
        ]
        return search.admit(await search.draft(edits))

    async def _read(
        self, search: Search, parent: Candidate, names: tuple[str, ...], tasks: Sequence[str], draw: int
    ) -> Ask:
        (score,) = await search.score([parent], tasks, Purpose.SEARCH, draw=draw + 1)
        return Ask(Kind.CRITIQUE, parent, names, tuple(trial for trial in score.trials if not trial.fault), draw=draw)

    async def _select(self, search: Search, beam: Sequence[Candidate], fresh: Sequence[Candidate]) -> list[Candidate]:
        """The best on one batch. Of equal ones, the older stays: an edit has to earn its place."""
        size = min(self.score_batch, len(search.validation_tasks))
        tasks = search.random.sample(search.validation_tasks, size)
        everyone = [*beam, *fresh]
        means = common_means(await search.score(everyone, tasks, Purpose.BATCH))
        ranked = sorted(
            ((mean, -place) for place, mean in enumerate(means) if mean is not None),
            reverse=True,
        )
        return [everyone[-place] for _, place in ranked[: self.beam_width]] or list(beam)
