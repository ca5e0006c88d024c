"""A search without episodes: a task is solved if the template holds its word. Proposers that know the words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.prompt_tuning.proposal import Candidate, Kind, Reply, Request
from ajet.prompt_tuning.search import Search
from ajet.prompt_tuning.trial import Purpose, Score, Trial
from ajet.schema.resources import PromptSet, PromptTemplate

WORDS = ("check", "capacity", "equipment", "calendar")


def prompts(text: str = "Solve: {question}", name: str = "solver", **more: str) -> PromptSet:
    return PromptSet({key: PromptTemplate(value) for key, value in {name: text, **more}.items()})


def word_of(task: str) -> str:
    return WORDS[int(task[1:]) % len(WORDS)]


class World:
    """`Evaluate`, counting what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...], Purpose, int]] = []

    async def __call__(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
    ) -> list[list[Trial]]:
        self.asked += [(candidate.id, tuple(tasks), purpose, draw) for candidate in candidates]
        return [[self.trial(candidate, task) for task in tasks] for candidate in candidates]

    def trial(self, candidate: Candidate, task: str) -> Trial:
        solved = word_of(task) in " ".join(candidate.texts.values())
        feedback = "" if solved else f"missing: {word_of(task)}"
        return Trial(
            task, float(solved), float(solved), feedback=feedback, episodes=(f"{candidate.id}-{task}",), tokens=(10, 2),
            prompts_used=frozenset(candidate.texts),
        )  # fmt: skip

    def episodes(self, purpose: Purpose | None = None) -> int:
        return sum(len(tasks) for _, tasks, kind, _ in self.asked if purpose is None or kind is purpose)


class Divided(World):
    """Each template solves its own tasks, and one task is solved by the start alone: so the start stays on the Pareto
    front, several candidates descend from it, and merging them is worth it."""

    def trial(self, candidate: Candidate, task: str) -> Trial:
        if task == "v0":
            return Trial(task, float(candidate.id == "c0"), episodes=("e",), prompts_used=frozenset(candidate.texts))
        word = word_of(task)
        name = sorted(candidate.texts)[WORDS.index(word) % len(candidate.texts)]
        solved = word in candidate.texts[name]
        feedback = "" if solved else f"missing: {word}"
        used = frozenset(candidate.texts)
        return Trial(task, float(solved), feedback=feedback, episodes=("e",), prompts_used=used)


class Editor:
    """Adds a word that the feedback names; `rewrite` adds any."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Reply:
        self.requests.append(request)
        return Reply(self.answer(request), 100, 20)

    def answer(self, request: Request) -> str:
        missing = sorted({trial.feedback for trial in request.trials if trial.feedback})
        if request.kind is Kind.CRITIQUE:
            return "; ".join(missing) or "nothing is missing"
        said = request.feedback.split("; ") if request.kind is Kind.EDIT else missing
        words = [text.removeprefix("missing: ") for text in said if text.startswith("missing")]
        if request.kind is Kind.REWRITE:
            words = [WORDS[request.draw % len(WORDS)]]
        name = request.names[request.draw % len(request.names)]
        return f'<template name="{name}">{request.candidate.texts[name]} {" ".join(words[:1])}</template>'


class Notes:
    """`Journal` in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.best: list[tuple[str, float | None]] = []

    def note(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def commit(self, event: str, **fields: Any) -> None:
        self.note(event, **fields)

    def keep_best(self, candidate: Candidate, score: Score) -> None:
        self.best.append((candidate.id, score.mean))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]


def make_search(
    world: Any = None, proposer: Any = None, start: PromptSet | None = None, **options: Any
) -> tuple[Search, Notes]:
    notes = options.pop("journal", None) or Notes()
    search = Search(
        start or prompts(),
        [f"t{number}" for number in range(12)],
        [f"v{number}" for number in range(8)],
        world or World(),
        proposer or Editor(),
        notes,
        **options,
    )
    return search, notes
