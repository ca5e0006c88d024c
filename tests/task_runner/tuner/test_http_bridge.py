"""The short way from a worker process to the gateway: real servers, OpenAI's client above it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import MagicMock

import openai
import pytest
from openai.types.chat import ChatCompletion

from ajet.config import Config
from ajet.gateway.protocol import Caller
from ajet.system.http_messages import Answer, HttpRequest, json_answer
from ajet.system.http_server import HttpServer
from ajet.task_runner.tuner import AjetTuner, connection
from ajet.task_runner.tuner.clients import _read_reply, openai_client
from ajet.task_runner.tuner.connection import Connection, HttpBridge, LoopBridge

USER: Any = [{"role": "user", "content": "hi"}]
REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
}


class Gateway:
    """Answers by what it was given; remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[HttpRequest] = []
        self.cancelled = asyncio.Event()
        self.waiting = asyncio.Event()

    def admit(self, request: HttpRequest) -> Answer | None:
        return None

    async def handle(self, request: HttpRequest) -> Answer:
        self.asked.append(request)
        if self.answers:
            return self.answers.pop(0)
        self.waiting.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            self.cancelled.set()

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return json_answer({"error": {"message": message, "code": code}}, status)


@asynccontextmanager
async def serving(handler: Gateway) -> AsyncIterator[HttpServer]:
    server = HttpServer(handler)
    await server.start("127.0.0.1", 0, "")
    try:
        yield server
    finally:
        await server.aclose()


def client_of(server: HttpServer) -> Any:
    return openai_client(Connection(f"{server.address.url}/v1", "sk-1", "ajet-a", proxied=False))


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


def error(status: int) -> Answer:
    return json_answer({"error": {"message": "no", "code": "why"}}, status, {"retry-after-ms": "1"})


def test_requests_share_a_connection_and_carry_the_key() -> None:
    async def work() -> None:
        handler = Gateway(*[json_answer(REPLY, headers={"x-request-id": "r"}) for _ in range(3)])
        async with serving(handler) as server:
            client = client_of(server)
            assert isinstance(client.bridge, HttpBridge)
            for _ in range(3):
                reply = await client.chat.completions.create(messages=USER)
                assert reply.choices[0].message.content == "hello" and reply._request_id == "r"
            assert server.connections == 1
        first = handler.asked[0]
        assert (first.method, first.path) == ("POST", "/v1/chat/completions")
        assert first.headers[b"authorization"] == b"Bearer sk-1"
        assert json.loads(first.body) == {"messages": USER, "model": "ajet-a"}

    in_loop(work)


def test_an_idle_connection_that_was_closed_is_replaced() -> None:
    async def work() -> None:
        handler = Gateway(json_answer(REPLY), json_answer(REPLY))
        async with serving(handler) as server:
            client = client_of(server)
            await client.chat.completions.create(messages=USER)
            assert server._connections is not None
            server._connections.abort()
            assert (await client.chat.completions.create(messages=USER)).choices[0].message.content == "hello"
        assert len(handler.asked) == 2

    in_loop(work)


def test_errors_are_those_of_the_client_and_are_asked_for_once() -> None:
    async def work() -> None:
        handler = Gateway(error(400), error(429), json_answer(REPLY))
        async with serving(handler) as server:
            client = client_of(server)
            with pytest.raises(openai.BadRequestError, match="no"):
                await client.chat.completions.create(messages=USER)
            assert len(handler.asked) == 1
            assert (await client.chat.completions.create(messages=USER)).choices[0].message.content == "hello"
            assert len(handler.asked) == 3, "429 was asked again by the client"

    in_loop(work)


def test_whatever_the_caller_sets_for_http_goes_through_the_library() -> None:
    async def work() -> None:
        handler = Gateway(*[json_answer(REPLY) for _ in range(3)])
        async with serving(handler) as server:
            client = client_of(server)
            await client.chat.completions.create(messages=USER, timeout=30)
            await client.with_options(default_headers={"x-mine": "1"}).chat.completions.create(messages=USER)
            await client.with_options(api_key="sk-2").chat.completions.create(messages=USER)
        assert all(b"user-agent" in request.headers for request in handler.asked)
        assert handler.asked[1].headers[b"x-mine"] == b"1"
        assert handler.asked[2].headers[b"authorization"] == b"Bearer sk-2"

    in_loop(work)


def test_a_cancelled_caller_cancels_the_call() -> None:
    async def work() -> None:
        handler = Gateway()
        async with serving(handler) as server:
            asking = asyncio.create_task(client_of(server).chat.completions.create(messages=USER))
            await handler.waiting.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.wait_for(handler.cancelled.wait(), 30)

    in_loop(work)


def test_a_gateway_that_is_gone() -> None:
    async def work() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
            client = openai_client(Connection(url, "k", "m", proxied=False)).with_options(max_retries=0)
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(messages=USER)
            with pytest.raises(OSError, match="Connect call failed"):
                await HttpBridge(url, "k").ask("POST", "/v1/x", b"")

    in_loop(work)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"x" * 200_000,
    ],
)
def test_what_no_gateway_of_ours_says_is_no_answer(said: bytes) -> None:
    async def work() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(OSError, match="the gateway"):
                await HttpBridge(f"http://127.0.0.1:{port}/v1", "k").ask("POST", "/v1/x", b"{}")

    in_loop(work)


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://127.0.0.1:80/v1", True),
        ("http://[::1]:80/v1", True),
        ("https://127.0.0.1:80/v1", False),
        ("http://localhost:80/v1", False),
        ("http://10.0.0.1:80/v1", False),
        ("http://127.0.0.1:80/gateway/v1", False),
        ("http://ajet.in-process/v1", False),
    ],
)
def test_which_gateways_are_reached_so(url: str, reached: bool) -> None:
    assert HttpBridge.can_reach(url) == reached


WHOLE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "agent",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": {
                "content": [{"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": []}],
                "refusal": None,
            },
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "prompt_token_ids": [1, 2],
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "changed",
    [{}, {"model": 5}, {"choices": [{"index": "first"}]}, {"choices": None}, {"id": "\ud800"}],
    ids=["valid", "a number", "fields missing", "null", "half a character"],
)
def test_a_reply_is_the_object_that_openai_s_client_makes_of_it(changed: dict[str, Any]) -> None:
    body = json.dumps({**WHOLE, **changed}).encode()
    ours, theirs = _read_reply(body), ChatCompletion.construct(**json.loads(body))
    assert ours == theirs
    assert ours.to_dict() == theirs.to_dict()
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_stream_in_the_same_process_that_fails_ends_for_its_reader(
    monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        raise ValueError("no usage")

    async def failing(*_: Any) -> Answer:
        return Answer(200, chunks())

    async def read(bridge: LoopBridge) -> list[bytes]:
        body = (await bridge.ask("POST", "/v1/chat/completions", b"")).body
        assert not isinstance(body, bytes)
        return [chunk async for chunk in body]

    monkeypatch.setattr(connection, "answer", failing)
    service = asyncio.new_event_loop()
    thread = threading.Thread(target=service.run_forever)
    thread.start()
    bridge = LoopBridge(cast(Caller, None), service)
    with pytest.raises(ValueError, match="no usage"):
        if blocking:
            list(bridge.ask_blocking("POST", "/v1/chat/completions", b"", 30)[1])
        else:
            asyncio.run(asyncio.wait_for(read(bridge), 30))
    service.call_soon_threadsafe(service.stop)
    thread.join()
    service.close()


def test_a_forked_process_is_told_that_nothing_answers_there() -> None:
    """Its copy of the loop doesn't run: it would wait for ever, and its parent for it."""
    fork = multiprocessing.get_context("fork")
    told: Any = fork.SimpleQueue()
    session, loop = MagicMock(), asyncio.new_event_loop()
    tuner, bridge = AjetTuner(session, Config(), loop, MagicMock()), LoopBridge(Caller(session), loop)

    def ask() -> None:
        calls: list[Callable[[], object]] = [
            lambda: bridge.call(lambda: None),
            lambda: tuner.reward(1.0),
            tuner.as_oai_baseurl_apikey,
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                told.put(str(error))

    child = fork.Process(target=ask)
    child.start()
    child.join(30)
    child.kill()
    for _ in range(3):
        assert not told.empty() and "as_oai_baseurl_apikey()" in told.get()
