"""Who is calling, and what for: model names, the agent's header, untrained calls, embeddings, browsers."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest

from ajet.gateway.chat.reply import EmbeddingEndpoint, SessionSettings
from ajet.gateway.protocol import agent_key
from ajet.system.http_messages import Answer, HttpRequest, json_answer
from ajet.system.http_server import HttpServer
from support.gateway_parts import Place, place, post
from support.raw_http import Reply, request_bytes, send
from support.session_parts import USER, LineEngine

CHAT = "/v1/chat/completions"
PAGE = "http://localhost:3000"


async def get(where: Place, path: str, key: str | None = None) -> Reply:
    return await send(where.port, request_bytes("GET", path, key or where.key.api_key))


@pytest.mark.parametrize(
    ("model", "header", "agent"),
    [
        ("ajet-solver", "", "solver"),
        ("ajet/solver", "", "solver"),
        ("gpt-4o", "", "default_agent"),
        ("openai/gpt-4o", "solver", "solver"),
        ("ajet-critic", "solver", "solver"),
        (None, "", "default_agent"),
    ],
)
def test_the_agent_is_named_by_model_or_header(model: str | None, header: str, agent: str) -> None:
    async def run() -> None:
        async with place() as here:
            body = {"messages": USER, "model": model}
            reply = await post(here, CHAT, body, **({"x_ajet_agent": header} if header else {}))
            assert reply.status == 200 and reply.json()["model"] == (model or "ajet-default_agent")
            assert [call.agent for call in here.session.tracker.calls] == [agent]

    asyncio.run(run())


def test_an_agents_key_is_for_no_other_name() -> None:
    async def run() -> None:
        async with place() as here:
            mine = agent_key(here.key.api_key, "solver", "t")
            for path, body in ((CHAT, {"messages": USER}), ("/v1/responses", {"input": "x"})):
                assert (await post(here, path, {**body, "model": "ajet-critic"}, mine)).status == 403
                assert (await post(here, path, body, mine, x_ajet_agent="critic")).status == 403
                assert (await post(here, path, body, mine, x_ajet_agent="solver")).status == 200
            assert (await post(here, CHAT, {"messages": USER}, x_ajet_agent="x" * 201)).status == 400

    asyncio.run(run())


def test_models_that_are_not_trained() -> None:
    async def run() -> None:
        async with place(LineEngine("hi"), settings=SessionSettings(untrained_models=("*-mini", "title"))) as here:
            chat, items = {"messages": USER}, {"input": "x"}
            for path, body in ((CHAT, chat), ("/v1/responses", items), ("/v1/messages", {**chat, "max_tokens": 9})):
                for model in ("gpt-mini", "gpt", "title", "titles"):
                    assert (await post(here, path, {**body, "model": model})).status == 200
            assert (await post(here, "/v1/completions", {"prompt": "x", "model": "title"})).status == 200
            assert [call.trainable for call in here.session.tracker.calls] == [False, True, False, True] * 3 + [False]

    asyncio.run(run())


def test_one_model() -> None:
    async def run() -> None:
        async with place() as here:
            for name in ("ajet-solver", "ajet/solver", "gpt-4o"):
                for path in (f"/v1/models/{name}", f"/v1/models/{quote(name, safe='')}"):
                    reply = await get(here, path)
                    assert (reply.status, reply.json()["id"], reply.json()["object"]) == (200, name, "model")
            mine = agent_key(here.key.api_key, "solver", "t")
            assert (await get(here, "/v1/models/ajet-critic", mine)).status == 403
            assert (await get(here, "/v1/models/x", "wrong")).status == 401
            assert (await post(here, "/v1/models/x", {})).status == 405

    asyncio.run(run())


# ---------------------------------------------------------------- embeddings


class EmbeddingServer:
    """A server that makes embeddings, or fails."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[dict[str, object]] = []

    def admit(self, request: HttpRequest) -> Answer | None:
        return None

    async def handle(self, request: HttpRequest) -> Answer:
        self.asked.append({"path": request.path, **json.loads(request.body)})
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
        return json_answer({"object": "list", "data": data, "model": "e", "usage": {"prompt_tokens": 1}}, self.status)

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return json_answer({}, status)


def test_embeddings_come_from_the_helper() -> None:
    async def run() -> None:
        async with place() as here:
            reply = await post(here, "/v1/embeddings", {"model": "x", "input": "hello"})
            assert reply.status == 501 and "ajet.helper.embedding_model" in reply.json()["error"]["message"]
        helper = EmbeddingServer()
        server = HttpServer(helper)
        await server.start("127.0.0.1", 0, "")
        endpoint = EmbeddingEndpoint(f"{server.address.url}/v1", "k", "small")
        async with place(settings=SessionSettings(embeddings=endpoint)) as here:
            reply = await post(here, "/v1/embeddings", {"model": "x", "input": ["hello"], "dimensions": 2})
            assert reply.status == 200 and reply.json()["data"][0]["embedding"] == [0.5, 1.0]
            assert helper.asked == [{"path": "/v1/embeddings", "model": "small", "input": ["hello"], "dimensions": 2}]
            assert here.session.tracker.calls == []
            assert (await post(here, "/v1/embeddings", {"model": "x"})).status == 400
            helper.status = 400
            assert (await post(here, "/v1/embeddings", {"input": "x"})).status == 400
            helper.status = 401
            assert (await post(here, "/v1/embeddings", {"input": "x"})).status == 502
        await server.aclose()

    asyncio.run(run())


# ---------------------------------------------------------------- browsers


def test_only_configured_pages_may_call_from_a_browser() -> None:
    async def ask(here: Place, method: str, origin: str, key: str = "") -> Reply:
        data = request_bytes(method, CHAT, key, {"messages": USER} if method == "POST" else b"", origin=origin)
        return await send(here.port, data)

    async def run() -> None:
        async with place() as here:
            assert (await ask(here, "OPTIONS", PAGE)).status == 405
            reply = await ask(here, "POST", PAGE, here.key.api_key)
            assert reply.status == 200 and "access-control-allow-origin" not in reply.headers
        async with place(allowed_origins=(PAGE,)) as here:
            reply = await ask(here, "OPTIONS", PAGE)
            assert reply.status == 204 and reply.headers["access-control-allow-origin"] == PAGE
            assert "POST" in reply.headers["access-control-allow-methods"]
            assert "authorization" in reply.headers["access-control-allow-headers"]
            assert (await ask(here, "OPTIONS", "http://elsewhere")).status == 405
            for key, status in ((here.key.api_key, 200), ("wrong", 401)):
                reply = await ask(here, "POST", PAGE, key)
                assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
            reply = await ask(here, "POST", "http://elsewhere", here.key.api_key)
            assert "access-control-allow-origin" not in reply.headers
        async with place(allowed_origins=("*",)) as here:
            assert (await ask(here, "OPTIONS", "http://elsewhere")).status == 204

    asyncio.run(run())


def test_a_model_is_one_for_both_protocols() -> None:
    async def run() -> tuple[Any, Any]:
        async with place() as here:
            page = json.loads((await get(here, "/v1/models")).body)
            return page["data"][0], json.loads((await get(here, "/v1/models/any")).body)

    for found in asyncio.run(run()):
        assert found["object"] == found["type"] == "model" and found["display_name"] == found["id"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
    ],
)
def test_the_field_that_is_wrong_is_named(given: dict[str, Any], param: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **given}

    async def run() -> Any:
        async with place() as here:
            return (await post(here, CHAT, body)).json()

    assert asyncio.run(run())["error"]["param"] == param
