"""A proposer that takes its time: what the terminal says meanwhile, and when its question has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from io import StringIO
from typing import Any

import pytest

from ajet.backbone.prompt.settings import PatientProposer
from ajet.observe.progress import PlainDisplay, Progress
from ajet.prompt_tuning import Candidate, Kind, ProposerError, Reply, Request
from ajet.schema.resources import PromptSet, PromptTemplate

START = Candidate("c0", PromptSet({"solver": PromptTemplate("Solve: {question}")}))
REQUEST = Request(Kind.REWRITE, [], START, ("solver",))


class Told(StringIO):
    """What the terminal was told, and an event for it."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = asyncio.Event()

    def flush(self) -> None:
        if self.getvalue().count("has not answered") == 2:
            self.twice.set()


def asked(
    script: Callable[[Told, Callable[[Request], Coroutine[Any, Any, Reply]]], Coroutine[Any, Any, None]],
    proposer: Any,
    timeout_s: float = 600.0,
    quiet_s: float = 0.01,
) -> str:
    async def run() -> str:
        told = Told()
        progress = Progress(PlainDisplay(told))
        await script(told, PatientProposer(proposer(told), timeout_s, progress, quiet_s))
        return told.getvalue()

    return asyncio.run(run())


def test_silence_is_told_until_somebody_answers() -> None:
    def proposer(told: Told) -> Any:
        async def propose(request: Request) -> Reply:
            await told.twice.wait()
            return Reply("done")

        return propose

    async def script(told: Told, patient: Any) -> None:
        assert await asyncio.gather(patient(REQUEST), patient(REQUEST)) == [Reply("done")] * 2
        before = told.getvalue()
        await asyncio.sleep(0.05)
        assert told.getvalue() == before, "nobody waits any more"

    said = asked(script, proposer)
    expected = ": 2 questions wait, each at most 10 min 00 s (prompt_tuning.proposer_timeout)"
    assert [line.partition(": ")[1] + line.partition(": ")[2] for line in said.splitlines()] == [expected] * 2


def test_a_question_without_an_answer_has_failed_and_is_cancelled() -> None:
    cancelled = []

    def proposer(told: Told) -> Any:
        async def propose(request: Request) -> Reply:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(request)
                raise
            raise AssertionError

        return propose

    async def script(told: Told, patient: Any) -> None:
        with pytest.raises(ProposerError, match=r"no answer within 0\.01 s \(ajet\.prompt_tuning\.proposer_timeout\)"):
            await patient(REQUEST)

    asked(script, proposer, timeout_s=0.01, quiet_s=600)
    assert cancelled == [REQUEST]


def test_the_proposer_s_own_timeouts_are_its_own() -> None:
    def proposer(told: Told) -> Any:
        async def propose(request: Request) -> Reply:
            raise TimeoutError("its own")

        return propose

    async def script(told: Told, patient: Any) -> None:
        with pytest.raises(TimeoutError, match="its own"):
            await patient(REQUEST)

    assert asked(script, proposer) == ""
