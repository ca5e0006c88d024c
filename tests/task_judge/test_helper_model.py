"""The helper model's client against a server that speaks OpenAI's protocol, on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.config.root import HelperConfig
from ajet.schema.errors import ConfigError
from ajet.task_judge.helper import HelperBudget, HelperBudgetError, HelperError, HelperModel
from support.http_server import Answer, Server

ASK = [{"role": "user", "content": "Is it right?"}]
USAGE = {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}
QUICKLY = {"retry-after-ms": "1"}


def reply(text: str | None = "yes", usage: dict[str, int] | None = USAGE) -> Answer:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return 200, {}, body


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(lambda *_: reply())
    yield server
    server.http.shutdown()


def configured(server: Server, **keys: Any) -> Any:
    return SimpleNamespace(ajet=SimpleNamespace(helper=HelperConfig(model="big", base_url=server.url, **keys)))


def test_asks_the_configured_model_and_counts(server: Server) -> None:
    config = configured(server, api_key="key", price_per_million={"input": 1000, "output": 10_000})
    helper = HelperModel.from_config(config)
    assert asyncio.run(helper.complete(ASK, temperature=0.5)) == "yes"
    path, body, key = server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "key")
    assert (body["model"], body["messages"], body["temperature"]) == ("big", ASK, 0.5)
    assert (helper.budget.calls, helper.budget.input_tokens, helper.budget.output_tokens) == (1, 30, 10)
    assert helper.budget.cost == pytest.approx(0.03 + 0.1)


def test_a_reply_without_text_is_empty(server: Server) -> None:
    server.handle = lambda *_: reply(None)
    assert asyncio.run(HelperModel("m", server.url).complete(ASK)) == ""


@pytest.mark.parametrize(
    "body",
    [
        b"<html>welcome</html>",
        b"{broken",
        b'{"choices": "\xff"}',
        {"error": {"message": "quota"}},
        [1],
        {"choices": []},
        {"choices": [{"message": None}]},
        "text",
    ],
)
def test_what_is_no_reply_is_an_error_that_names_the_address(server: Server, body: Any) -> None:
    kind = {"content-type": "text/html" if body in (b"<html>welcome</html>", "text") else "application/json"}
    server.handle = lambda *_: (200, kind, json.dumps(body).encode() if not isinstance(body, bytes) else body)
    model = HelperModel("m", server.url)
    for asked in (model.complete(ASK), model.embed(["a"])):
        with pytest.raises(HelperError, match=rf"'m' at {server.url}: the server's answer isn't one of OpenAI's"):
            asyncio.run(asked)


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None, "completion_tokens": None}, "none"])
def test_a_usage_without_numbers_is_none(server: Server, usage: Any) -> None:
    server.handle = lambda *_: reply(usage=usage)
    assert asyncio.run(HelperModel("m", server.url).complete(ASK)) == "yes"
    limited = HelperModel("m", server.url, budget=HelperBudget(HelperConfig(max_tokens=100)))
    with pytest.raises(HelperError, match="the endpoint reports no token usage"):
        asyncio.run(limited.complete(ASK))


def test_half_a_surrogate_pair_is_sent_escaped(server: Server) -> None:
    half = [{"role": "user", "content": [{"type": "text", "text": "Größe \ud83d"}]}]
    assert asyncio.run(HelperModel("m", server.url).complete(half)) == "yes"
    assert server.seen[0][1]["messages"][0]["content"] == [{"type": "text", "text": "Größe \\ud83d"}]


def test_many_threads_and_loops_share_one_model(server: Server) -> None:
    config = configured(server)
    said: list[str] = []

    def judge() -> None:
        said.append(asyncio.run(HelperModel.from_config(config).complete(ASK)))

    threads = [threading.Thread(target=judge) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["yes"] * 8
    assert HelperModel.from_config(config).budget.calls == 8
    assert HelperModel.from_config(configured(server)).budget.calls == 0, "another run, another budget"


def test_passing_trouble_is_retried(server: Server) -> None:
    answers = [(503, QUICKLY, {"error": {"message": "busy"}}), (429, QUICKLY, {}), reply("late")]
    server.handle = lambda *_: answers.pop(0)
    helper = HelperModel("m", server.url)
    assert asyncio.run(helper.complete(ASK)) == "late"
    assert len(server.seen) == 3 and helper.budget.calls == 1


def test_lasting_trouble_is_an_error_that_names_model_and_place(server: Server) -> None:
    server.handle = lambda *_: (401, {}, {"error": {"message": "wrong key"}})
    with pytest.raises(HelperError, match=rf"'m' at {server.url}: .*wrong key"):
        asyncio.run(HelperModel("m", server.url).complete(ASK))


@pytest.mark.parametrize(
    ("limits", "key", "allowed"),
    [
        ({"max_calls": 2}, "max_calls", 2),
        ({"max_tokens": 100}, "max_tokens", 3),
        ({"max_cost": 0.04, "price_per_million": {"input": 1000}}, "max_cost", 2),
    ],
)
def test_a_spent_budget_names_its_key(server: Server, limits: dict[str, Any], key: str, allowed: int) -> None:
    helper = HelperModel.from_config(configured(server, **limits))

    async def ask() -> None:
        for _ in range(allowed):
            await helper.complete(ASK)
        with pytest.raises(HelperBudgetError, match=rf"ajet\.helper\.{key}: .*used up"):
            await helper.complete(ASK)

    asyncio.run(ask())
    assert len(server.seen) == allowed, "the refused call was never made"


def test_limits_on_tokens_need_an_endpoint_that_reports_them(server: Server) -> None:
    server.handle = lambda *_: reply(usage=None)
    assert asyncio.run(HelperModel("m", server.url).complete(ASK)) == "yes"
    with pytest.raises(HelperError, match=r"reports no token usage.*max_calls"):
        asyncio.run(HelperModel("m", server.url, budget=HelperBudget(HelperConfig(max_tokens=9))).complete(ASK))


def test_cancelling_the_caller_ends_the_call(server: Server) -> None:
    asked, leave = threading.Event(), threading.Event()

    def stall(*_: Any) -> Answer:
        asked.set()
        leave.wait(10)
        return reply()

    server.handle = stall

    async def ask() -> None:
        call = asyncio.create_task(HelperModel("m", server.url).complete(ASK))
        await asyncio.to_thread(asked.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(ask())
    leave.set()


def test_a_model_nobody_named_and_an_endpoint_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"ajet\.helper\.model"):
        HelperModel.from_config(SimpleNamespace(ajet=SimpleNamespace(helper=HelperConfig())))
    with pytest.raises(ConfigError, match=r"'m'.*ajet\.helper\.base_url"):
        asyncio.run(HelperModel("m").complete(ASK))
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert HelperModel("m").endpoint() == ("https://api.openai.com/v1", "from-environment", "m")
