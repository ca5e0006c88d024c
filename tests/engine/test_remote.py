"""The remote engine against real sockets: exact where the server speaks token ids, patient, and typed in its errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import io
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.remote import RemoteEngine
from ajet.engine.remote_client import Endpoint, RemoteSettings, pair_endpoints
from ajet.schema.chat import ChatRequest, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EngineOverloadedError,
    FeatureUnavailableError,
    GenerationTimeoutError,
    InvalidRequestError,
)
from ajet.system import http_client
from support.http_server import Answer, Handle, Server


def npy(array: Any, **options: Any) -> str:
    """As vLLM sends one."""
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def choice(ids: list[int], finish: str | None = "stop", stop: Any = None) -> dict[str, Any]:
    logprobs = {
        "token_logprobs": [-0.5] * len(ids),
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}] * len(ids),
    }
    return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}]}


def completions(path: str, body: dict[str, Any], key: str) -> Answer:
    """A server that speaks token ids."""
    if body.get("stream"):
        return 200, {"content-type": "text/event-stream"}, [choice([7], None), choice([8, 9], "stop", 9)]
    return 200, {}, choice([7, 8, 9], "length" if body["max_tokens"] == 3 else "stop")


def answering(content: Any) -> Handle:
    """Answer the engine's question whether there are token ids, and then this."""
    return lambda path, body, key: completions(path, body, key) if body["max_tokens"] == 1 else (200, {}, content)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(completions)
    yield server
    server.http.shutdown()


def settings(server: Server | EndlessServer, **options: Any) -> RemoteSettings:
    endpoints = options.pop("endpoints", (Endpoint(server.url, "k"),))
    return RemoteSettings(endpoints, "m", **{"first_pause_s": 0.01, "timeout_s": 5.0, **options})


def draw(engine: RemoteEngine, on_tokens: Any = None, **fields: Any) -> Any:
    sampling = Sampling(**fields.pop("sampling", {}))
    request = GenerateRequest(fields.pop("prompt", [1, 2]), sampling, **fields)

    async def once() -> Any:
        try:
            return await engine.generate(request, on_tokens)
        finally:
            await engine.aclose()

    return asyncio.run(once())


def test_token_ids_go_out_and_come_back(server: Server) -> None:
    engine = RemoteEngine(settings(server))
    assert isinstance(engine, Engine)
    reply = draw(engine, top_logprobs=2, sampling={"top_k": 4, "seed": 3, "max_tokens": 3})
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ([7, 8, 9], [-0.5] * 3, "length")
    assert reply.top_logprobs[0] == [(7, -0.5), (9, -1.5)]
    path, body, key = server.seen[-1]
    assert (path, body["prompt"], body["top_k"], body["seed"], key) == ("/v1/completions", [1, 2], 4, 3, "k")
    assert engine.capabilities.exact_tokens


@pytest.mark.parametrize("served", ["tiny:qwen2", "another", "no /tokenize", "count", "pieces", "none"])
def test_a_server_with_another_tokenizer_gets_messages(
    server: Server, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model would be asked, and its replies read, in the wrong tokens."""
    tokenizer = ModelSource.resolve("tiny:qwen2").tokenizer()

    def handle(path: str, body: dict[str, Any], key: str) -> Answer:
        if not path.endswith("/tokenize"):
            return completions(path, body, key)
        ids = tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        other_forms = {"count": len(ids), "pieces": [{"id": each} for each in ids], "none": []}
        said = other_forms.get(served, ids + [0] * (served == "another"))
        return (403, {}, {}) if served == "no /tokenize" else (200, {}, {"tokens": said})

    async def exact() -> bool:
        engine = RemoteEngine(settings(server), "tiny:qwen2")
        await engine.ready()
        await engine.aclose()
        return engine.capabilities.exact_tokens

    server.handle = handle
    assert asyncio.run(exact()) == (served != "another")
    assert ("another tokenizer than ajet.model.path (tiny:qwen2)" in caplog.text) == (served == "another")
    assert "/tokenize" in [path for path, _, _ in server.seen]


def test_an_end_token_is_named_by_its_id(server: Server) -> None:
    assert draw(RemoteEngine(settings(server))).stopped_by == 9


def test_tokens_stream(server: Server) -> None:
    chunks: list[TokenChunk] = []
    reply = draw(RemoteEngine(settings(server)), chunks.append)
    assert [chunk.token_ids for chunk in chunks] == [[7], [8, 9]]
    assert (reply.token_ids, reply.stopped_by) == ([7, 8, 9], 9)


def failing(times: int, status: int, headers: dict[str, str] | None = None) -> Handle:
    left = [times]

    def handle(path: str, body: dict[str, Any], key: str) -> Answer:
        if left[0] > 0:
            left[0] -= 1
            return status, headers or {}, {"error": {"message": "not now"}}
        return completions(path, body, key)

    return handle


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_faults_are_tried_again(server: Server, status: int) -> None:
    server.handle = failing(3, status)
    assert draw(RemoteEngine(settings(server))).token_ids == [7, 8, 9]


def test_a_fault_that_stays_is_typed(server: Server) -> None:
    server.handle = failing(99, 429)
    with pytest.raises(EngineOverloadedError, match="not now"):
        draw(RemoteEngine(settings(server, max_attempts=3)))
    assert len(server.seen) == 3
    server.handle = failing(99, 500)
    with pytest.raises(EngineError, match="500"):
        draw(RemoteEngine(settings(server, max_attempts=2)))


def test_retry_after_is_obeyed(server: Server) -> None:
    server.handle = failing(1, 429, {"retry-after": "0.2"})
    began = time.monotonic()
    draw(RemoteEngine(settings(server)))
    assert time.monotonic() - began >= 0.2


def test_nobody_there_is_an_engine_error(server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(EngineError, match="can't be reached"):
        draw(RemoteEngine(settings(server, max_attempts=2)))


def test_what_is_wrong_with_the_request_is_said_at_once(server: Server) -> None:
    async def scenario() -> None:
        engine = RemoteEngine(settings(server))
        await engine.ready()
        server.handle = failing(99, 400)
        with pytest.raises(InvalidRequestError, match="not now"):
            await engine.generate(GenerateRequest([1], Sampling()))
        server.handle = lambda *_: (400, {}, {"error": {"message": "maximum context length is 5"}})
        with pytest.raises(ContextOverflowError):
            await engine.generate(GenerateRequest([1], Sampling()))
        assert len(server.seen) == 3
        with pytest.raises(InvalidRequestError, match="temperature"):
            await engine.generate(GenerateRequest([1], Sampling(temperature=-1)))
        assert len(server.seen) == 3
        await engine.aclose()

    asyncio.run(scenario())


def test_a_refused_key_is_left_for_the_next(server: Server) -> None:
    def handle(path: str, body: dict[str, Any], key: str) -> Answer:
        return completions(path, body, key) if key == "good" else (401, {}, {"error": "bad key"})

    server.handle = handle
    keys = (Endpoint(server.url, "bad"), Endpoint(server.url, "good"))
    assert draw(RemoteEngine(settings(server, endpoints=keys))).token_ids
    with pytest.raises(EngineError, match="api_key"):
        draw(RemoteEngine(settings(server, endpoints=keys[:1])))


def test_keys_take_turns_when_one_is_exhausted(server: Server) -> None:
    def handle(path: str, body: dict[str, Any], key: str) -> Answer:
        return completions(path, body, key) if key == "b" else (429, {"retry-after": "60"}, {})

    server.handle = handle
    keys = (Endpoint(server.url, "a"), Endpoint(server.url, "b"))
    began = time.monotonic()
    assert draw(RemoteEngine(settings(server, endpoints=keys))).token_ids
    assert time.monotonic() - began < 30


def test_a_deadline_is_kept(server: Server) -> None:
    async def scenario() -> None:
        engine = RemoteEngine(settings(server))
        await engine.ready()

        def slow(path: str, body: dict[str, Any], key: str) -> Answer:
            time.sleep(0.5)
            return completions(path, body, key)

        server.handle = slow
        with pytest.raises(GenerationTimeoutError):
            await engine.generate(GenerateRequest([1], Sampling(), deadline_s=0.05))
        await engine.aclose()

    asyncio.run(scenario())


def test_a_deadline_holds_for_the_question_what_the_server_can_do(server: Server) -> None:
    def frozen(*_: Any) -> Answer:
        time.sleep(1.0)
        return 200, {}, {}

    async def scenario() -> None:
        engine = RemoteEngine(settings(server))
        began = time.monotonic()
        with pytest.raises(GenerationTimeoutError):
            await engine.generate(GenerateRequest([1], Sampling(), deadline_s=0.1))
        assert time.monotonic() - began < 0.9
        await engine.aclose()

    server.handle = frozen
    asyncio.run(scenario())


def test_the_pace_is_kept(server: Server) -> None:
    async def scenario() -> None:
        engine = RemoteEngine(settings(server, requests_per_minute=60 / 0.1))
        await engine.ready()
        began = time.monotonic()
        await asyncio.gather(*(engine.generate(GenerateRequest([1], Sampling())) for _ in range(4)))
        assert time.monotonic() - began >= 0.3
        await engine.aclose()

    asyncio.run(scenario())


def chat_only(path: str, body: dict[str, Any], key: str) -> Answer:
    """A server for chat, as most are."""
    if path != "/v1/chat/completions":
        return 404, {}, {"error": {"message": "no such path"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]} if body.get("tools") else {"content": "hi"}
    return 200, {}, {"id": "x", "choices": [{"message": message, "finish_reason": "stop"}]}


def _cut_short(status: int, headers: dict[str, str], content: Any) -> Answer:
    content["choices"][0]["finish_reason"] = "length"
    return status, headers, content


def test_a_server_without_token_ids_can_be_talked_to_but_not_trained(server: Server) -> None:
    server.handle = chat_only

    async def scenario() -> None:
        engine = RemoteEngine(settings(server))
        await engine.ready()
        assert not engine.capabilities.exact_tokens
        with pytest.raises(EngineError, match="token ids"):
            await engine.generate(GenerateRequest([1], Sampling()))
        with pytest.raises(FeatureUnavailableError):
            await engine.load_weights(None, 1)
        reply = await engine.reply(ChatRequest([{"role": "user", "content": "?"}]))
        assert (reply.message["content"], reply.finish_reason, reply.completion.token_ids) == ("hi", "stop", [])
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        reply = await engine.reply(ChatRequest([{"role": "user", "content": "?"}], tools=[tool]))
        assert reply.finish_reason == "tool_calls"
        server.handle = lambda path, body, key: _cut_short(*chat_only(path, body, key))
        reply = await engine.reply(ChatRequest([{"role": "user", "content": "?"}], tools=[tool]))
        assert (reply.finish_reason, reply.completion.finish_reason) == ("length", "length")
        assert set(server.seen[-1][1]) == {"model", "messages", "tools", "tool_choice", "temperature", "top_p"}
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.reply(ChatRequest([]))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "content",
    [
        [],
        "x",
        "gesperrt für Gäste".encode("latin-1"),
        {"choices": []},
        {"choices": [{"token_ids": [1], "logprobs": {}}]},
    ],
)
def test_a_malformed_answer_is_typed(server: Server, content: Any) -> None:
    async def scenario() -> None:
        engine = RemoteEngine(settings(server, max_attempts=2))
        await engine.ready()
        server.handle = lambda *_: (200, {}, content if content != [] else "[]")
        with pytest.raises(EngineError):
            await engine.generate(GenerateRequest([1], Sampling()))
        await engine.aclose()

    asyncio.run(scenario())


def test_the_experts_that_vllm_chose_are_read(server: Server) -> None:
    """Of two prompt tokens and three of the reply, the last was not computed."""
    experts = np.arange(4 * 2 * 3).reshape(4, 2, 3) + 240
    answer = choice([7, 8, 9])
    answer["choices"][0]["routed_experts"] = npy(experts.astype(np.uint16))
    server.handle = answering(answer)
    reply = draw(RemoteEngine(settings(server)))
    assert reply.experts.dtype == np.int16
    assert reply.experts.tolist() == experts.tolist()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ("AAAA", "are no array"),
        ("A", "are no array"),
        (npy(np.array([{}]), allow_pickle=True), "are no array"),
        (
            npy(np.zeros((3, 2, 3), np.uint8)),
            r"are uint8 of shape \(3, 2, 3\); .* for 4 tokens",
        ),
        (npy(np.zeros((4, 2, 3))), "are float64"),
        (npy(np.zeros(4, np.uint8)), "of shape"),
    ],
)
def test_experts_that_can_not_be_read_are_typed(server: Server, sent: str, why: str) -> None:
    answer = choice([7, 8, 9])
    answer["choices"][0]["routed_experts"] = sent
    server.handle = answering(answer)
    with pytest.raises(EngineError, match=why):
        draw(RemoteEngine(settings(server)))


@pytest.mark.parametrize(("code", "error"), [(400, InvalidRequestError), (500, EngineError)])
def test_an_error_in_a_stream_is_typed_by_its_code(server: Server, code: int, error: type[Exception]) -> None:
    """vLLM answers 200 before it looks at the tokens of a prompt."""
    refused = {"error": {"message": "Token id 1000000 is out of vocabulary", "code": code}}
    stream = (200, {"content-type": "text/event-stream"}, [refused])
    server.handle = lambda path, body, key: stream if body.get("stream") else completions(path, body, key)
    with pytest.raises(error, match="Token id 1000000 is out of vocabulary"):
        draw(RemoteEngine(settings(server)), lambda chunk: None)


def test_addresses_and_keys_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert pair_endpoints("http://a/v1/", None) == (Endpoint("http://a/v1", ""),)
    assert [each.api_key for each in pair_endpoints("http://a", ["1", "2"])] == ["1", "2"]
    assert [each.base_url for each in pair_endpoints(["http://a", "http://b"], "k")] == ["http://a", "http://b"]
    for wrong in ((None, None), (["http://a", "http://b"], ["1", "2", "3"]), ("a/v1", None)):
        with pytest.raises(ConfigError, match="remote"):
            pair_endpoints(*wrong)
    assert "secret" not in repr(Endpoint("http://a", "secret"))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", ["plain", "chunked", "one line", "an error", "headers", "gzip"])
def test_an_answer_without_end_is_not_taken_in(form: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client.BoundedClient.__init__, "__kwdefaults__", {"max_answer_bytes": 1 << 20})
    with EndlessServer(form) as server:
        engine = RemoteEngine(settings(server, max_attempts=1))
        engine._exact = True
        with pytest.raises(EngineError):
            draw(engine, on_tokens=(lambda _: None) if streamed else None, sampling={"max_tokens": 4})
    assert server.sent < 16 << 20


def test_more_tokens_than_were_asked_for_are_refused(server: Server) -> None:
    server.handle = lambda *_: (200, {}, choice([7] * 1000))
    engine = RemoteEngine(settings(server))
    engine._exact = True
    with pytest.raises(EngineError, match="more than the 5 tokens that it was asked for"):
        draw(engine, sampling={"max_tokens": 5})


class EndlessServer:
    """Answers any request with bytes that don't end."""

    def __init__(self, form: str) -> None:
        self.sent = 0
        piece = b"x" * 65536
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        if form == "headers":
            head, piece = b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"y" * 4000 + b"\r\n"
        elif form == "chunked":
            head, piece = head + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + piece + b"\r\n"
        elif form == "gzip":
            packed = gzip.compress(b"x" * (64 << 20))
            head, piece = head + b"content-encoding: gzip\r\n\r\n", packed
        elif form == "an error":
            head = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        else:
            head += b"\r\n" + (b"data: " if form == "one line" else b"")
        self._head, self._piece = head, piece
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        client, _ = self._socket.accept()
        with client:
            client.recv(65536)
            with contextlib.suppress(OSError):
                client.sendall(self._head)
                while self.sent < 64 << 20:
                    client.sendall(self._piece)
                    self.sent += len(self._piece)

    def __enter__(self) -> EndlessServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._thread.join(10)
