"""Who answers a search: a helper model on a real socket, functions of the user's, and those that take their time."""

from __future__ import annotations

import asyncio
import sys
import threading
from io import StringIO
from typing import Any

import pytest

from ajet.backbone.prompt.settings import FunctionProposer, HelperProposer, PatientProposer
from ajet.config.root import HelperConfig
from ajet.observe.progress import PlainDisplay, Progress
from ajet.prompt_tuning import BudgetExhausted, Candidate, Kind, Proposer, ProposerError, Reply, Request
from ajet.prompt_tuning.proposal import Ask, messages_for
from ajet.schema.resources import PromptSet, PromptTemplate
from ajet.task_judge.helper import HelperBudget, HelperModel
from support.scripted_helper import helper

START = Candidate("c0", PromptSet({"solver": PromptTemplate("Solve: {question}")}))
REQUEST = Request(Kind.REWRITE, messages_for(Ask(Kind.REWRITE, START, ("solver",))), START, ("solver",))


def test_a_helper_model_reads_the_templates_and_its_tokens_are_counted() -> None:
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        return '<template name="solver">Better: {question}</template>'

    with helper(answer) as server:
        proposer = HelperProposer(HelperModel("m", server.url, "k"), 0.7, 60)
        first, second = (asyncio.run(proposer(REQUEST)) for _ in range(2))
    assert "Better: {question}" in first.text and "Solve: {question}" in asked[0]
    assert (first.prompt_tokens, first.sampled_tokens) == (second.prompt_tokens, second.sampled_tokens) == (30, 10)


def test_a_helper_that_fails_is_named_and_its_own_budget_ends_the_search() -> None:
    with helper(lambda text: (400, {}, {"error": {"message": "no such model"}})) as server:
        with pytest.raises(ProposerError, match=r"helper model 'm' at .*no such model"):
            asyncio.run(HelperProposer(HelperModel("m", server.url, "k"), 1.0, 60)(REQUEST))
        limited = HelperModel("m", server.url, "k", budget=HelperBudget(HelperConfig.model_construct(max_calls=0)))
        with pytest.raises(BudgetExhausted, match=r"ajet.helper.max_calls"):
            asyncio.run(HelperProposer(limited, 1.0, 60)(REQUEST))


async def later(request: Request) -> str:
    return "later"


async def leaves(request: Request) -> str:
    sys.exit(2)


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda request: "now", "now"), (later, "later"), (lambda request: 3, "returned int, not text"),
     (lambda request: 1 / 0, "raised ZeroDivisionError"), (lambda request: next(iter(())), "StopIteration"),
     (lambda request: sys.exit("no key"), "SystemExit: no key"), (leaves, "raised SystemExit")],
)  # fmt: skip
def test_functions_answer_or_are_named(function: Any, said: str) -> None:
    try:
        assert asyncio.run(FunctionProposer(function)(REQUEST)).text == said
    except ProposerError as error:
        assert said in str(error)


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
