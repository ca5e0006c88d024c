"""A proposer that takes its time: when its question has failed."""

from __future__ import annotations

import asyncio
import threading
from io import StringIO

import pytest

from ajet.backbone.prompt.settings import FunctionProposer, PatientProposer
from ajet.observe.progress import PlainDisplay, Progress
from ajet.prompt_tuning import Candidate, Kind, Proposer, ProposerError, Reply, Request
from ajet.schema.resources import PromptSet, PromptTemplate

START = Candidate("c0", PromptSet({"solver": PromptTemplate("Solve: {question}")}))
REQUEST = Request(Kind.REWRITE, [], START, ("solver",))


def ask(proposer: Proposer, timeout_s: float) -> None:
    async def run() -> None:
        await PatientProposer(proposer, timeout_s, Progress(PlainDisplay(StringIO())))(REQUEST)

    asyncio.run(run())


def test_a_question_without_an_answer_has_failed_and_is_cancelled() -> None:
    cancelled = []

    async def propose(request: Request) -> Reply:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request)
            raise
        raise AssertionError

    with pytest.raises(ProposerError, match=r"no answer within 0\.01 s \(ajet\.prompt_tuning\.proposer_timeout\)"):
        ask(propose, timeout_s=0.01)
    assert cancelled == [REQUEST]


def test_the_proposer_s_own_timeouts_are_its_own() -> None:
    async def propose(request: Request) -> Reply:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        ask(propose, timeout_s=600.0)


def test_functions_that_never_return_keep_no_thread_of_the_loop() -> None:
    release = threading.Event()
    progress = Progress(PlainDisplay(StringIO()))

    async def run() -> list[Reply | BaseException]:
        hanging = PatientProposer(FunctionProposer(lambda request: release.wait()), 0.05, progress)
        answers = await asyncio.gather(*(hanging(REQUEST) for _ in range(64)), return_exceptions=True)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 20)
        return answers

    timer = threading.Timer(60, release.set)  # a failure ends, too
    timer.start()
    try:
        assert {type(answer) for answer in asyncio.run(run())} == {ProposerError}
    finally:
        release.set()
        timer.cancel()
