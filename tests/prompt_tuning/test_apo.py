"""APO: what it finds, what it costs, and what it survives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet.prompt_tuning import BudgetExhausted, ProposerError, Purpose, Request, Sizes, Trial
from ajet.prompt_tuning.apo import APO
from ajet.prompt_tuning.best_of import BestOf
from ajet.prompt_tuning.proposal import Kind, Reply
from ajet.prompt_tuning.search import Earlier
from ajet.prompt_tuning.trial import Budget, Limits
from support.search_worlds import Editor, World, make_search, prompts

SMALL = APO(beam_width=2, branch_factor=3, critique_batch=4, score_batch=6, rounds=3)


def test_finds_what_the_feedback_names() -> None:
    search, notes = make_search(rounds=4)
    asyncio.run(SMALL.run(search))
    assert search.score_of(search.start) == 0.0
    assert search.score_of(search.best) == 1.0
    scores = [score for _, score in notes.best]
    assert scores == sorted(scores) and len(set(scores)) == len(scores), "only what is strictly better becomes the best"


def test_costs_what_its_arithmetic_says() -> None:
    world, editor = World(), Editor()
    search, notes = make_search(world, editor, rounds=1)
    asyncio.run(SMALL.run(search))
    branches = 2 * 3
    assert world.episodes(Purpose.SEARCH) == branches * 4
    kinds = [request.kind for request in editor.requests]
    fresh = len(notes.of("candidate")) - 1
    assert kinds.count(Kind.CRITIQUE) == branches
    assert world.episodes(Purpose.BATCH) == (1 + fresh) * 6, "the old beam and the edits on one batch"
    assert world.episodes(Purpose.VALIDATION) == 8 * (2 if search.best is not search.start else 1)
    assert SMALL.least_episodes(Sizes(12, 8)) == 8 + branches * 4 + (1 + branches) * 6 + 8


def test_candidates_of_a_round_meet_the_same_tasks_and_seeds() -> None:
    world = World()
    search, _ = make_search(world, rounds=2)
    asyncio.run(SMALL.run(search))
    batches = [(tasks, draw) for _, tasks, purpose, draw in world.asked if purpose is Purpose.BATCH]
    assert len(set(batches)) == 2, "one batch a round"
    assert len({draw for _, _, purpose, draw in world.asked if purpose is Purpose.VALIDATION}) == 1
    reading = [draw for _, _, purpose, draw in world.asked if purpose is Purpose.SEARCH]
    assert len(set(reading)) == len(reading), "equal branches see different episodes"


def test_a_failed_criticism_adds_no_copy() -> None:
    class Half(Editor):
        async def __call__(self, request: Request) -> Reply:
            if request.kind is Kind.CRITIQUE and request.draw % 2:
                raise ProposerError("busy")
            return await super().__call__(request)

    search, notes = make_search(proposer=Half(), rounds=1)
    asyncio.run(SMALL.run(search))
    versions = [candidate.version for candidate in search.candidates.values()]
    assert len(set(versions)) == len(versions) > 1
    assert any("busy" in refused["reason"] for refused in notes.of("refused"))


def test_a_dead_proposer_ends_the_search_by_name() -> None:
    class Dead(Editor):
        async def __call__(self, request: Request) -> Reply:
            raise ProposerError("helper model 'h' at http://nowhere: connection refused")

    search, notes = make_search(proposer=Dead())
    with pytest.raises(ProposerError, match=r"all 6 questions to the proposer failed.*http://nowhere"):
        asyncio.run(SMALL.run(search))
    assert [one["round"] for one in notes.of("round")] == [0], "the round of it doesn't count"


@pytest.mark.parametrize("algorithm", [SMALL, BestOf(proposals=3, rounds=3)])
def test_a_resumed_search_equals_one_that_was_never_interrupted(algorithm: APO | BestOf) -> None:
    whole, _ = make_search(rounds=3)
    asyncio.run(algorithm.run(whole))
    first, notes = make_search(rounds=1)
    asyncio.run(algorithm.run(first))
    last = notes.of("round")[-1]
    earlier = Earlier(
        candidates=list(first.candidates.values()),
        scores=[score for score in map(first.validation_of, first.candidates.values()) if score is not None],
        best=last["best"],
        round=last["round"],
        states=first.states,
        random_state=last["random"],
    )
    second, _ = make_search(rounds=3, earlier=earlier)
    asyncio.run(algorithm.run(second))
    assert [one.texts for one in second.candidates.values()] == [one.texts for one in whole.candidates.values()]
    assert second.best == whole.best
    assert second.score_of(second.best) == whole.score_of(whole.best)


def test_several_templates_change_together_or_in_turn() -> None:
    start = prompts(planner="Plan: {question}")
    together, _ = make_search(start=start, rounds=2)
    asyncio.run(SMALL.run(together))
    editor = Editor()
    in_turn, _ = make_search(start=start, rounds=2, tune="in_turn", proposer=editor)
    asyncio.run(SMALL.run(in_turn))
    assert {request.names for request in editor.requests} == {("solver",), ("planner",)}
    for candidate in in_turn.candidates.values():
        if candidate.round == 1:
            assert candidate.texts["planner"] == start.templates["planner"].template
    assert in_turn.score_of(in_turn.best) > 0  # type: ignore[operator]
    assert together.score_of(together.best) > 0  # type: ignore[operator]


def test_branches_that_run_at_once_keep_to_the_budget_together() -> None:
    class Slow(World):
        async def __call__(self, *asked: Any) -> list[list[Trial]]:
            await asyncio.sleep(0)  # the other branches begin
            return await super().__call__(*asked)

    world = Slow()
    search, _ = make_search(world, budget=Budget(Limits(episodes=30, reserved=10)), rounds=1)
    with pytest.raises(BudgetExhausted, match=r"8 of 30 were run .* the next batch needs 24"):
        asyncio.run(SMALL.run(search))
    assert world.episodes() == 8
