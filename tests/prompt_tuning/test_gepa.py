"""GEPA: through a search as alone, stopped by the budget, resumed, and with faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from ajet.prompt_tuning import BudgetExhausted, Candidate, ProposerError, Purpose, Request, Trial
from ajet.prompt_tuning.gepa import GEPA, SearchAdapter
from ajet.prompt_tuning.proposal import Reply, SearchFailedError
from ajet.prompt_tuning.search import Earlier
from ajet.prompt_tuning.trial import Budget, Limits
from support.search_worlds import Divided, Editor, Notes, World, make_search, prompts

gepa = pytest.importorskip("gepa")
TWO = prompts(planner="Plan: {question}")


def alone(algorithm: GEPA, **options: Any) -> Any:
    """`gepa.optimize` itself, with the same adapter: no `GEPA.run` around it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        search, _ = make_search(**options)
        return gepa.optimize(**algorithm.options(search, SearchAdapter(search, loop)))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def through_us(algorithm: GEPA, **options: Any) -> tuple[Any, Notes]:
    search, notes = make_search(**options)
    asyncio.run(algorithm.run(search))
    return search, notes


MERGING = GEPA(minibatch=4, merges=10, in_turn=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("algorithm", "world", "rounds"),
    [(GEPA(merges=0), World, 10), (GEPA(merges=3, in_turn=True), World, 10), (MERGING, Divided, 30)],
    ids=["together", "in turn", "merging"],
)
def test_through_a_search_equals_alone(algorithm: GEPA, world: type[World], rounds: int, seed: int) -> None:
    options = {"start": TWO, "rounds": rounds, "seed": seed, "world": world()}
    theirs = alone(algorithm, **options)
    search, notes = through_us(algorithm, **options)
    validated = [one for one in notes.of("scores") if one["purpose"] == "validation"]
    assert [search.candidates[one["candidate"]].texts for one in validated] == theirs.candidates
    assert [one["mean"] for one in validated] == pytest.approx(theirs.val_aggregate_scores)
    scores = [[trial["reward"] for trial in one["trials"]] for one in validated]
    assert scores == [list(by_task.values()) for by_task in theirs.val_subscores]
    assert search.score_of(search.best) == pytest.approx(max(theirs.val_aggregate_scores))
    for number, parents in enumerate(theirs.parents[1:], 1):
        ours = search.candidates[validated[number]["candidate"]]
        expected = [theirs.candidates[parent] for parent in parents]
        assert sorted(map(str, (search.candidates[name].texts for name in ours.parents))) == sorted(map(str, expected))


def test_candidates_of_a_front_are_merged() -> None:
    search, _ = through_us(MERGING, start=TWO, rounds=30, seed=0, world=Divided())
    merged = [candidate for candidate in search.candidates.values() if candidate.made_by == "merge"]
    assert merged and all(len(candidate.parents) == 2 for candidate in merged)


def test_finds_what_the_feedback_names() -> None:
    search, _ = through_us(GEPA(), rounds=12)
    assert search.score_of(search.best) == 1.0
    best = search.best
    assert best.made_by in ("reflect", "merge") and best.parents


def test_parent_and_child_meet_the_same_tasks_and_seeds() -> None:
    world = World()
    through_us(GEPA(), world=world, rounds=2)
    reading = [(tasks, draw) for _, tasks, purpose, draw in world.asked if purpose is Purpose.SEARCH]
    assert reading[0] == reading[1] and reading[2] == reading[3] and reading[1] != reading[2]


@pytest.mark.parametrize("done", [1, 3])
def test_a_resumed_search_equals_one_that_was_never_interrupted(done: int) -> None:
    algorithm = GEPA(merges=3)
    whole, _ = through_us(algorithm, start=TWO, rounds=6)
    first, notes = through_us(algorithm, start=TWO, rounds=done)
    last = notes.of("round")[-1]
    earlier = Earlier(
        candidates=list(first.candidates.values()),
        scores=[score for score in map(first.validation_of, first.candidates.values()) if score is not None],
        best=last["best"],
        round=last["round"],
        states=first.states,
        random_state=last["random"],
    )
    world = World()
    second, _ = through_us(algorithm, start=TWO, rounds=6, earlier=earlier, world=world)
    assert [one.texts for one in second.candidates.values()] == [one.texts for one in whole.candidates.values()]
    assert second.best.texts == whole.best.texts
    again = [asked for asked in world.asked if asked[0] == "c0" and asked[2] is Purpose.VALIDATION]
    assert not again, "nothing that is recorded is run again"


def test_the_budget_stops_the_package() -> None:
    world = World()
    search, _ = make_search(world, budget=Budget(Limits(episodes=31)), rounds=99)
    with pytest.raises(BudgetExhausted, match="of 31"):
        asyncio.run(GEPA().run(search))
    assert world.episodes() <= 31


def test_a_dead_proposer_ends_the_search_by_name() -> None:
    class Dead(Editor):
        async def __call__(self, request: Request) -> Reply:
            raise ProposerError("helper model 'h' at http://nowhere: connection refused")

    search, _ = make_search(proposer=Dead(), rounds=9)
    with pytest.raises(ProposerError, match="http://nowhere"):
        asyncio.run(GEPA().run(search))
    assert search.round == 1


def test_a_fault_is_no_zero() -> None:
    class Flaky(World):
        def trial(self, candidate: Candidate, task: str) -> Trial:
            if task == "v3" and candidate.id != "c0":
                return Trial(task, None, fault=True, failure="EngineError: gone")
            return super().trial(candidate, task)

    search, _ = make_search(Flaky(), rounds=9)
    with pytest.raises(SearchFailedError, match=r"1 of 8 episodes could not be scored.*\n?.*EngineError: gone"):
        asyncio.run(GEPA().run(search))


def test_cancelling_ends_the_packages_thread() -> None:
    class Slow(World):
        def __init__(self) -> None:
            super().__init__()
            self.waiting = asyncio.Event()

        async def __call__(
            self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
        ) -> list[list[Trial]]:
            if purpose is Purpose.SEARCH:
                self.waiting.set()
                await asyncio.Event().wait()
            return await super().__call__(candidates, tasks, purpose, draw, round)

    async def interrupted() -> None:
        world = Slow()
        search, _ = make_search(world)
        running = asyncio.create_task(GEPA().run(search))
        await world.waiting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    before = set(threading.enumerate())
    asyncio.run(interrupted())
    assert set(threading.enumerate()) <= before
