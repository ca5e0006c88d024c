"""An error's first line says what to write instead."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from ajet.schema.task import WorkflowOutput
from ajet.task_runner.results import is_bug, message_of


class Answer(BaseModel):
    number: int
    words: list[str]


def raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as error:
        function()
    return error.value


def another_agentscope() -> None:
    pytest.importorskip("agentscope")
    from agentscope.agent import NoSuchAgent  # type: ignore[attr-defined] # noqa: F401


def asked_within_a_loop() -> None:
    async def execute() -> None:
        nothing = asyncio.sleep(0)
        try:
            asyncio.run(nothing)
        finally:
            nothing.close()

    asyncio.run(execute())


def shared_by_loops() -> None:
    event = asyncio.Event()

    async def wait() -> None:
        async with asyncio.timeout(0):
            await event.wait()

    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            asyncio.run(wait())


def no_key() -> None:
    openai.AsyncOpenAI(api_key=None)


def refused_by(url: str, status: int) -> openai.APIStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", url))
    kind = openai.AuthenticationError if status == 401 else openai.InternalServerError
    return kind("no", response=response, body=None)


def unawaited() -> None:
    reward = asyncio.sleep(0)
    try:
        WorkflowOutput.model_validate({"reward": reward})
    finally:
        reward.close()


def misspelt() -> None:
    WorkflowOutput.model_validate({"reward": 1.0, "log_metric": {"calls": 1}})


def test_pydantics_first_problem_is_told_with_its_field_and_reason() -> None:
    error = raised(lambda: Answer.model_validate({"number": "x", "words": 3}))
    assert message_of(error) == ("Answer.number: Input should be a valid integer, not 'x' (and 1 more)")
    assert not is_bug(error)


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (unawaited, "WorkflowOutput.reward.float: .*: write `await` before the call$"),
        (misspelt, "WorkflowOutput.log_metric: .*: the fields are reward, is_success, metadata, log_metrics$"),
        (asked_within_a_loop, "event loop: write `await …` instead, or a plain `def`"),
        (shared_by_loops, "different event loop: episodes have an event loop each, .* make the client in `execute`"),
        (no_key, r"tuner\.as_raw_openai_sdk_client\(\)"),
        (
            another_agentscope,
            r"'NoSuchAgent'.*: it is written for AgentScope (1\.0|2), and \d.* pip install 'agentscope[<>]",
        ),
    ],
)
def test_a_mistake_is_named_with_what_to_write(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[], None], fix: str
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    error = raised(wrong)
    assert is_bug(error)
    assert re.search(fix, message_of(error).partition("\n")[0])


def test_a_groups_message_says_what_its_first_error_was() -> None:
    group = ExceptionGroup("unhandled errors in a TaskGroup", [ExceptionGroup("more", [KeyError("a")]), OSError("b")])
    assert message_of(group) == "unhandled errors in a TaskGroup (2 sub-exceptions): KeyError: 'a'"


def test_a_provider_that_refuses_the_key_is_a_client_of_the_wrong_model() -> None:
    assert "tuner.as_raw" in message_of(refused_by("https://api.openai.com/v1/chat/completions", 401))
    assert message_of(refused_by("http://127.0.0.1:80/v1", 401)) == "no"


@pytest.mark.parametrize(("error", "bug"), [
    (raised(lambda: None.group()), False),  # type: ignore[attr-defined] # as of a search in a cut reply
    (raised(lambda: "".nothing()), True),  # type: ignore[attr-defined]
    (KeyError("answer"), False),
    (refused_by("http://127.0.0.1:80/score", 500), True),
    (refused_by("http://127.0.0.1:80/score", 401), False),
    (ExceptionGroup("tasks", [NameError("x"), ExceptionGroup("more", [ImportError("y")])]), True),
    (ExceptionGroup("tasks", [NameError("x"), KeyError("answer")]), False),
])  # fmt: skip
def test_a_reply_may_be_to_blame_or_not(error: Exception, bug: bool) -> None:
    assert is_bug(error) is bug
