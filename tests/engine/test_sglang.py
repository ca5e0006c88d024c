"""The SGLang engine against a stand-in for its server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.engine.base import Engine
from ajet.engine.remote_client import Endpoint, RemoteSettings
from ajet.engine.sglang import SglangEngine
from ajet.schema.chat import GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import EngineError, GenerationTimeoutError
from support.http_server import Answer, Server


def sglang(path: str, body: dict[str, Any], key: str) -> Answer:
    if path != "/generate":
        return 200, {}, {"success": True}
    if body["input_ids"][0] == 666:
        time.sleep(0.3)
    rows = [[-0.5, 7, None], [-0.25, 9, None]]
    finish = {"type": "stop", "matched": 9}
    meta = {
        "finish_reason": finish,
        "output_token_logprobs": rows,
        "output_top_logprobs": [rows, rows],
        "cached_tokens": 3,
    }
    return 200, {}, {"text": "", "output_ids": [7, 9], "meta_info": meta}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(sglang)
    yield server
    server.http.shutdown()


def new_engine(server: Server) -> SglangEngine:
    root = server.url.removesuffix("/v1")
    return SglangEngine(RemoteSettings((Endpoint(root),), "m", max_attempts=2, first_pause_s=0.01))


def test_it_draws_and_updates_weights(server: Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = new_engine(server)
        assert isinstance(engine, Engine)
        await engine.ready()
        chunks: list[TokenChunk] = []
        request = GenerateRequest([1, 2], Sampling(seed=3, max_tokens=5), "s", top_logprobs=2)
        reply = await engine.generate(request, chunks.append)
        assert (reply.token_ids, reply.logprobs, reply.stopped_by) == ([7, 9], [-0.5, -0.25], 9)
        assert (reply.cached_prompt_tokens, reply.finish_reason, reply.versions) == (3, "stop", [(0, 0)])
        assert reply.top_logprobs is not None
        assert chunks[0].token_ids == [7, 9]
        parameters = server.seen[-1][1]["sampling_params"]
        assert (parameters["sampling_seed"], parameters["max_new_tokens"]) == (3, 5)
        await engine.load_weights(tmp_path, 4)
        assert server.seen[-1][:2] == ("/update_weights_from_disk", {"model_path": str(tmp_path), "flush_cache": True})
        assert (await engine.generate(request)).versions == [(0, 4)]
        with pytest.raises(EngineError, match="folder"):
            await engine.load_weights({}, 5)
        await engine.aclose()

    asyncio.run(scenario())


def test_a_late_request_is_aborted_at_the_server(server: Server) -> None:
    async def scenario() -> None:
        engine = new_engine(server)
        with pytest.raises(GenerationTimeoutError):
            await engine.generate(GenerateRequest([666], Sampling(), deadline_s=0.1))
        async with asyncio.timeout(5):
            while server.seen[-1][0] != "/abort_request":
                await asyncio.sleep(0.02)
        assert server.seen[-1][1]["rid"] == server.seen[0][1]["rid"]
        await engine.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("abort_s", [0.0, 3.0], ids=["refuses", "is frozen"])
def test_a_server_that_can_not_abort_keeps_nobody_waiting(server: Server, abort_s: float) -> None:
    def handle(path: str, body: dict[str, Any], key: str) -> Answer:
        if path == "/abort_request":
            time.sleep(abort_s)
            return 500, {}, {"error": "it can't"}
        time.sleep(0.5)
        return sglang(path, body, key)

    async def scenario() -> None:
        engine = new_engine(server)
        began = time.monotonic()
        with pytest.raises(GenerationTimeoutError):
            await engine.generate(GenerateRequest([1], Sampling(), deadline_s=0.1))
        left = asyncio.create_task(engine.generate(GenerateRequest([1], Sampling())))
        await asyncio.sleep(0.1)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert time.monotonic() - began < 2.8
        await engine.aclose()

    server.handle = handle
    asyncio.run(scenario())


@pytest.mark.parametrize(
    "content", [{}, {"meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "stop"}}}]
)
def test_a_strange_answer_is_typed(server: Server, content: dict[str, Any]) -> None:
    server.handle = lambda *_: (200, {}, content)
    with pytest.raises(EngineError):
        asyncio.run(new_engine(server).generate(GenerateRequest([1], Sampling())))
