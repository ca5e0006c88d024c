"""`Search`: what an algorithm is given. It scores candidates, asks the proposer, keeps the best and ends rounds.

It knows neither engine nor files: `Evaluate` runs the episodes, a `Proposer` answers, and a `Journal` keeps what
happened. What a round has found counts once `end_round` has written it; a search that is resumed begins after the last
round that was. `Algorithm` is what an optimiser of prompt templates is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ajet.prompt_tuning.proposal import (
    THINKING,
    Ask,
    Candidate,
    Draft,
    Proposer,
    ProposerError,
    Request,
    SearchFailedError,
    UnusedTemplateError,
    again,
    changed,
    messages_for,
    read_templates,
    refusal,
)
from ajet.prompt_tuning.trial import Budget, Purpose, Score, Trial, common_means
from ajet.schema.errors import concurrently
from ajet.schema.printable import encodable
from ajet.schema.resources import PromptSet

MANY_DRAWS = 1_000_000
"""Draws of one round that can be told apart from the next round's."""
MANY_ROUNDS, MANY_SEEDS = 10_000, 10_000
"""Rounds of one search, and searches with other seeds, whose questions to the proposer are told apart."""
BARREN_ROUNDS = 3
"""A search ends after this many rounds in a row in which every proposal was refused."""


class Evaluate(Protocol):
    """Runs every candidate on every task, and returns their trials in that order: one list for each candidate.

    `draw`: together with the task, it decides which replies are sampled, so equal draws are compared fairly.
    """

    async def __call__(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
    ) -> list[list[Trial]]: ...


class Journal(Protocol):
    """Keeps what happened, in order."""

    def note(self, event: str, **fields: Any) -> None:
        """Something that counts once its round is committed."""

    def commit(self, event: str, **fields: Any) -> None:
        """The end of a round. Returns when it can't be lost any more."""

    def keep_best(self, candidate: Candidate, score: Score) -> None:
        """There is a new best candidate."""


@dataclass(slots=True)
class Earlier:
    """What the rounds before a resume found."""

    candidates: list[Candidate] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    """All validations."""
    best: str = "c0"
    round: int = 0
    """The last complete one; 0: only the start was validated."""
    states: list[dict[str, Any]] = field(default_factory=list)
    """What the algorithm passed to `end_round`, round by round."""
    random_state: Any = None


class Search:
    """One search. Used on one event loop."""

    def __init__(
        self,
        start: PromptSet,
        search_tasks: Sequence[str],
        validation_tasks: Sequence[str],
        evaluate: Evaluate,
        proposer: Proposer,
        journal: Journal,
        *,
        rounds: int = 3,
        tune: Literal["together", "in_turn"] = "together",
        budget: Budget | None = None,
        retries: int = 2,
        seed: int = 0,
        earlier: Earlier | None = None,
        on_round: Callable[[Search], None] = lambda search: None,
        episodes_per_trial: int = 1,
    ) -> None:
        """Tasks are named by their ids. `retries`: how often a refused proposal is asked for again."""
        earlier = earlier or Earlier()
        first = earlier.candidates or [Candidate("c0", start)]
        self.search_tasks, self.validation_tasks = tuple(search_tasks), tuple(validation_tasks)
        self.rounds = rounds
        self.budget = budget or Budget()
        self.seed = seed
        self.random = random.Random(seed)
        if earlier.random_state is not None:
            version, internal, gauss = earlier.random_state
            self.random.setstate((version, tuple(internal), gauss))
        self.candidates = {candidate.id: candidate for candidate in first}
        self.best = self.candidates[earlier.best]
        self.round = earlier.round
        """The round that is going on, or that has just ended."""
        self.refused = 0
        """Questions of this round whose answer was refused, or that failed."""
        self.refused_in_all = 0
        """The count over all rounds since the start or the resume."""
        self.states = list(earlier.states)
        """What was passed to `end_round`, round by round, before and after a resume."""
        self.trials: list[Trial] = []
        self._evaluate, self._proposer, self._journal = evaluate, proposer, journal
        self._start, self._tune, self._retries = start, tune, retries
        self._on_round = on_round
        self._repeats = episodes_per_trial
        self._validations = {score.candidate: score for score in earlier.scores}
        self._asked = self._failed = self._barren = 0
        self.why_refused = ""
        self.ended_because = ""
        """Why no further round may begin although there could be more; empty if nothing speaks against it."""
        self._looked = bool(earlier.candidates)
        if not earlier.candidates:
            self._journal.note("candidate", **first[0].to_record())

    # ------------------------------------------------------------ rounds

    @property
    def start(self) -> Candidate:
        return self.candidates["c0"]

    @property
    def more_rounds(self) -> bool:
        """Whether another round may begin."""
        return self.round < self.rounds and not self.ended_because

    def begin_round(self) -> int:
        """Its number, from 1. Raises BudgetExhausted if nothing is left for it."""
        self.budget.check(1)
        self.round += 1
        self.refused = self._asked = self._failed = 0
        self.trials = []
        return self.round

    def names_of_round(self, number: int) -> tuple[str, ...]:
        """The templates that change in this round: all, or each in its turn."""
        names = tuple(self.start.prompts.templates)
        return names if self._tune == "together" else (names[(number - 1) % len(names)],)

    async def end_round(self, state: dict[str, Any] | None = None) -> None:
        """The round is complete. `state`: plain data that the algorithm needs in later rounds."""
        if self._asked and self._failed == self._asked:
            raise ProposerError(
                f"round {self.round}: all {self._asked} questions to the proposer failed. The last: {self.why_refused}"
            )
        fruitless = self._asked and not any(one.round == self.round for one in self.candidates.values())
        self._barren = self._barren + 1 if fruitless else 0
        if self._barren >= BARREN_ROUNDS:
            self.ended_because = (
                f"{self._barren} rounds in a row, every proposal was refused. The last: {self.why_refused}"
            )
        self.states.append(state or {})
        self._commit(state or {})

    def end_unfinished_round(self, why: str) -> None:
        """The budget ended the round: keep what it has found. Raises SearchFailedError if there is nothing to keep."""
        if self.start.id not in self._validations:
            raise SearchFailedError(f"ajet.prompt_tuning.{why}, before the first templates had a score: raise it")
        if self.trials:
            self._commit(None)

    def _commit(self, state: dict[str, Any] | None) -> None:
        self._journal.commit(
            "round",
            round=self.round,
            best=self.best.id,
            score=self.score_of(self.best),
            refused=self.refused,
            rounds=self.rounds,
            spent=self.budget.spent.to_record(),
            left=self.budget.left,
            partial=state is None,
            state=state,
            random=self.random.getstate(),
        )
        self._on_round(self)

    # ------------------------------------------------------------ scores

    def check_budget(self, trials: int) -> None:
        """Raise BudgetExhausted unless so many trials may begin."""
        self.budget.check(trials * self._repeats)

    async def score(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, *, draw: int = 0
    ) -> list[Score]:
        """Try each candidate on each task, with the same sampling seeds. Raises BudgetExhausted before it begins."""
        self.check_budget(len(candidates) * len(tasks))
        whole_run = purpose in (Purpose.VALIDATION, Purpose.CONFIRMATION)  # comparable between rounds
        number = draw if whole_run else self.round * MANY_DRAWS + draw
        results = await self._evaluate(candidates, tasks, purpose, number, self.round)
        scores = [Score(one.id, purpose, tuple(trials)) for one, trials in zip(candidates, results, strict=True)]
        for score in scores:
            self._count(score.trials)
            trials = [trial.to_record() for trial in score.trials]
            self._journal.note(
                "scores", round=self.round, purpose=str(purpose), candidate=score.candidate, mean=score.mean,
                trials=trials, spent=self.budget.spent.to_record(),
            )  # fmt: skip
        self._look_at([trial for score in scores for trial in score.trials])
        return scores

    async def validate(self, candidate: Candidate) -> Score:
        """All validation tasks. A candidate is validated once: the same tasks and seeds measure the same."""
        known = self._validations.get(candidate.id)
        if known is not None:
            return known
        (score,) = await self.score([candidate], self.validation_tasks, Purpose.VALIDATION)
        if candidate is self.start:
            self._validations[candidate.id] = score
            self._journal.keep_best(candidate, score)
            self._commit({})
        return score

    def consider(self, score: Score) -> bool:
        """A candidate's validation: it becomes the best if it is strictly better, on the tasks that count in both."""
        candidate = self.candidates[score.candidate]
        self._validations[candidate.id] = score
        ours, theirs = common_means([self._validations[self.best.id], score])
        if theirs is None or (ours is not None and theirs <= ours):
            return False
        self.best = candidate
        self._journal.keep_best(candidate, score)
        return True

    def score_of(self, candidate: Candidate) -> float | None:
        """Its mean over all validation tasks; None if it has none."""
        known = self._validations.get(candidate.id)
        return None if known is None else known.mean

    def validation_of(self, candidate: Candidate) -> Score | None:
        return self._validations.get(candidate.id)

    def _count(self, trials: Sequence[Trial]) -> None:
        self.trials += trials
        prompt, sampled = (sum(trial.tokens[index] for trial in trials) for index in (0, 1))
        self.budget.add_episodes(sum(max(1, len(trial.episodes)) for trial in trials), prompt, sampled)

    def _look_at(self, trials: Sequence[Trial]) -> None:
        """What no further episode would change."""
        if trials and all(trial.fault for trial in trials):
            raise SearchFailedError(
                f"no episode of this batch could be scored: {len(trials)} of {len(trials)} tasks failed for reasons of "
                f"neither templates nor model. The last: {trials[-1].failure}"
            )
        if self._looked:
            return
        self._looked = True
        failed = [trial for trial in trials if trial.reward is None]
        if len(failed) == len(trials):
            raise SearchFailedError(
                f"all {len(trials)} tasks failed with the templates as they are. The last: {failed[-1].failure}\n"
                "    `--backbone=debug` runs two of them and shows each turn and traceback"
            )
        self._look_for_unused([trial for trial in trials if trial.reward is not None])

    def _look_for_unused(self, trials: Sequence[Trial]) -> None:
        known = [trial.prompts_used for trial in trials if trial.prompts_used is not None]
        if len(known) < len(trials):
            return  # runners in other languages don't say
        unused = [name for name in self.start.prompts.templates if not any(name in used for used in known)]
        if unused:
            raise UnusedTemplateError(
                f"no episode used template {unused[0]!r}: {len(trials)} episodes ended, and their workflow never "
                f'called tuner.prompt("{unused[0]}"), so no text of it could matter\n'
                "    ask for it in the workflow, or remove it from ajet.prompt_tuning.templates"
            )

    # ------------------------------------------------------------ proposals

    async def critique(self, asks: Sequence[Ask]) -> list[str | None]:
        """A text for each question; None where the proposer failed."""
        return await concurrently(self._critique(ask) for ask in asks)

    async def draft(self, asks: Sequence[Ask]) -> list[Draft | None]:
        """A checked proposal for each question; None where it was refused or the proposer failed."""
        return await concurrently(self._draft(ask) for ask in asks)

    def admit(self, drafts: Sequence[Draft | None]) -> list[Candidate]:
        """Number the proposals, in order. Of equal ones, the first counts."""
        admitted = []
        for draft in drafts:
            if draft is None:
                continue
            prompts = changed(draft.ask.parent.prompts, draft.texts)
            if any(prompts.version == candidate.version for candidate in self.candidates.values()):
                self._refuse(draft.ask, draft.texts, "it is the same as another proposal of this round")
                continue
            ask = draft.ask
            read = ask.source or ask.trials
            admitted.append(self.add(prompts, (ask.parent.id,), str(ask.kind), ask.feedback, read))
        return admitted

    def add(
        self, prompts: PromptSet, parents: tuple[str, ...], made_by: str, feedback: str = "", read: Sequence[Trial] = ()
    ) -> Candidate:
        """A new candidate. `read`: the trials that it was written from."""
        candidate = Candidate(f"c{len(self.candidates)}", prompts, parents, made_by, feedback, self.round)
        self.candidates[candidate.id] = candidate
        seen = [{**trial.to_record(), "feedback": trial.feedback} for trial in read]
        self._journal.note("candidate", **candidate.to_record(), read=seen)
        return candidate

    async def _critique(self, ask: Ask) -> str | None:
        self._asked += 1
        try:
            text = THINKING.sub("", await self._ask(ask, messages_for(ask))).strip()
        except ProposerError as error:
            self._fail(ask, error)
            return None
        if not text:
            self._refuse(ask, {}, "the criticism is empty")
            return None
        return text

    async def _draft(self, ask: Ask) -> Draft | None:
        self._asked += 1
        messages = messages_for(ask)
        for attempt in range(self._retries + 1):
            try:
                reply = await self._ask(ask, messages, attempt)
            except ProposerError as error:
                self._fail(ask, error)
                return None
            texts: dict[str, str] = {}
            try:
                texts = read_templates(reply, ask.names)
                known = [candidate.version for candidate in self.candidates.values()]
                wrong = refusal(self._start, texts, ask.parent.prompts, known)
            except ValueError as error:
                wrong = str(error)
            if not wrong:
                return Draft(ask, texts)
            messages = again(messages, reply, wrong)
        self._refuse(ask, texts, wrong)
        return None

    async def _ask(self, ask: Ask, messages: list[dict[str, Any]], attempt: int = 0) -> str:
        self.budget.check()
        place = (self.seed % MANY_SEEDS * MANY_ROUNDS + self.round) * MANY_DRAWS + ask.draw
        draw = place * (self._retries + 1) + attempt
        reply = await self._proposer(Request(ask.kind, messages, ask.parent, ask.names, ask.trials, ask.feedback, draw))
        self.budget.add_question(reply.prompt_tokens, reply.sampled_tokens)
        return encodable(reply.text)

    def _fail(self, ask: Ask, error: ProposerError) -> None:
        self._failed += 1
        self._refuse(ask, {}, f"the proposer failed: {error}")

    def _refuse(self, ask: Ask, texts: dict[str, str], reason: str) -> None:
        self.refused += 1
        self.refused_in_all += 1
        self.why_refused = reason
        parents = [ask.parent.id]
        self._journal.note("refused", round=self.round, kind=str(ask.kind), parents=parents, texts=texts, reason=reason)


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
