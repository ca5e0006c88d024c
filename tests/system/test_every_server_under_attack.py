"""The same attacks on every server of ours: gateway, rollout store, environment service, span collector, viewer.

None of them makes a server fail, or take more memory than its limits; an honest client is served meanwhile and after.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from ajet.environment.environment import EnvironmentSettings
from ajet.environment.instances import InstanceLimits
from ajet.environment.server import EnvironmentServer
from ajet.gateway.endpoints import SpanCollector
from ajet.store.database_store import memory_store
from ajet.store.requests import Role
from ajet.store.server import StoreServer, issue
from support.gateway_parts import place
from support.raw_http import Reply, read_reply, request_bytes, send
from support.session_parts import USER

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parents[1]
KEY = "sk-ajet-" + "k" * 60
SENT = 24 * 1024 * 1024
"""What an attacker tries to send."""
TAKEN = 12 * 1024 * 1024
"""By how much the process may grow meanwhile. What comes after the refusal is read for a moment, and thrown away."""


class Target(NamedTuple):
    port: int
    key: str
    path: str
    """Takes JSON."""
    honest: Any
    """A body that it answers with 200."""


@asynccontextmanager
async def gateway() -> AsyncIterator[Target]:
    async with place() as here:
        yield Target(here.port, here.key.api_key, "/v1/chat/completions", {"model": "m", "messages": USER})


@asynccontextmanager
async def responses() -> AsyncIterator[Target]:
    async with place() as here:
        yield Target(here.port, here.key.api_key, "/v1/responses", {"model": "m", "input": "hi"})


@asynccontextmanager
async def anthropic() -> AsyncIterator[Target]:
    async with place() as here:
        body = {"model": "m", "messages": USER, "max_tokens": 5}
        yield Target(here.port, here.key.api_key, "/v1/messages", body)


@asynccontextmanager
async def traces() -> AsyncIterator[Target]:
    async with place() as here:
        yield Target(here.port, here.key.api_key, "/v1/traces", {"resourceSpans": []})


@asynccontextmanager
async def store() -> AsyncIterator[Target]:
    async with memory_store() as kept:
        key = await kept.tables(lambda tables: issue(tables, "all", list(Role)))
        server = StoreServer(kept)
        await server.start()
        try:
            yield Target(int(server.url.rpartition(":")[2]), key, "/v1/store/rollouts/query", {})
        finally:
            await server.aclose()


@asynccontextmanager
async def environment() -> AsyncIterator[Target]:
    worlds = TESTS / "support" / "worlds.py"
    server = EnvironmentServer(EnvironmentSettings(f"{worlds}->Counter"), InstanceLimits(instances=2), api_key=KEY)
    await server.start()
    try:
        yield Target(server.address.port, KEY, "/release", {"instance_id": "x"})
    finally:
        await server.aclose()


@asynccontextmanager
async def collector() -> AsyncIterator[Target]:
    async def sink(_: Sequence[Any]) -> None: ...

    server = SpanCollector(KEY, sink)
    await server.start("127.0.0.1", 0)
    try:
        yield Target(int(server.url.rpartition(":")[2]), KEY, "/v1/traces", {"resourceSpans": []})
    finally:
        await server.aclose()


with_model = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the `train` extra")
SERVERS = [
    *(pytest.param(serve, marks=with_model, id=serve.__name__) for serve in (gateway, responses, anthropic, traces)),
    *(pytest.param(serve, id=serve.__name__) for serve in (store, environment, collector)),
]


async def ask(target: Target, body: Any, path: str = "", key: str | None = None, **headers: str) -> Reply:
    sent = request_bytes(
        "POST",
        path or target.path,
        target.key if key is None else key,
        body,
        content_type="application/json",
        **headers,
    )
    return await send(target.port, sent)


async def still_serves(target: Target) -> None:
    reply = await ask(target, target.honest)
    assert reply.status == 200, reply


@pytest.fixture(params=SERVERS)
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """Each server in turn. It serves an honest client before and after."""
    async with request.param() as served:
        await still_serves(served)
        yield served
        await still_serves(served)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
ENDLESS = {
    "a header line": (b"POST /x HTTP/1.1\r\nx: ", b"y" * 65_536),
    "headers": (b"POST /x HTTP/1.1\r\n", b"x: " + b"y" * 4000 + b"\r\n"),
    "a target": (b"GET /", b"a" * 65_536),
    "a method": (b"", b"A" * 65_536),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: " + b"y" * 4000 + b"\r\n"),
    "a chunked body": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + b"z" * 65_536 + b"\r\n"),
    "a chunk size": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"0" * 65_536),
    "a chunk extension": (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"e" * 65_536),
    "a body": (HEAD + b"content-length: 1000000000\r\n\r\n", b"z" * 65_536),
    "healthz": (
        b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"x: yyyy\r\n" * 900,
    ),
    "empty lines": (b"", b"\r\n" * 32_768),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_stranger_that_sends_without_end_is_cut(target: Target, kind: str) -> None:
    head, piece = ENDLESS[kind]
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    taken, before = 0, psutil.Process().memory_info().rss
    with suppress(ConnectionError):
        writer.write(head)
        while taken < SENT and not reader.at_eof():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            taken += len(piece)
        grown = psutil.Process().memory_info().rss - before
        assert grown < TAKEN, f"{grown} bytes after {taken}"
        if not reader.at_eof():
            assert int((await asyncio.wait_for(reader.readline(), 10)).split()[1]) in range(400, 500)
    writer.transport.abort()


async def test_idle_and_dripping_connections_keep_nobody_out(target: Target) -> None:
    opened = []
    for number in range(120):
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write((b"", b"GET ", HEAD, HEAD + b"content-length: 10\r\n\r\n[")[number % 4])
        opened.append(writer)
    await still_serves(target)
    for writer in opened:
        writer.transport.abort()


BODIES: list[bytes] = [
    b"",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"a": ' + b"9" * 100_000 + b"}",
    b'{"instance_id": "\\ud800", "messages": "\\udfff", "input": "\\ud800"}',
    b'{"instance_id": "' + b"i" * 100_000 + b'"}',
    b'{"messages": [{"role": "user", "content": "\\u0000\\u202e\\u001b[31m"}], "model": "\\u202e", "max_tokens": 3}',
    b"null",
    b"\xff\xfe\x00",
    b'{"a": NaN, "b": Infinity}',
    b'{"__proto__": {}, "constructor": 1, "limit": -1, "offset": 1e308}',
    b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": 5, "attributes": "x"}]}]}]}',
    b'{"resourceSpans": {"a": []}}',
    b'{"previous_response_id": "../../etc/passwd", "input": [{"type": "item_reference", "id": "\\u0000"}]}',
]


async def test_malformed_bodies_get_an_answer_that_says_so(target: Target) -> None:
    for body in BODIES:
        for sent in {body, body.replace(b"}", b', "stream": true}', 1) if body.startswith(b'{"') else body}:
            reply = await ask(target, sent)
            assert reply.status < 500, (sent[:80], reply.body[:300])
            if "event-stream" not in reply.headers.get("content-type", ""):
                json.loads(reply.body)


PATHS = [
    "/../../etc/passwd",
    "//etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1/%00",
    "/" + "a/" * 2000,
    "/?" + "a=b&" * 999,
]
PATHS += [
    "/\u202e".encode().decode("latin-1"),
    "/v1/store/../keys",
    "/healthz/../create",
    "*",
    "http://evil.example/",
    "/v1//",
]


async def test_paths_lead_nowhere_else(target: Target) -> None:
    for path in PATHS:
        for method in ("GET", "POST", "DELETE", "CONNECT"):  # the last would switch to another protocol
            reply = await send(target.port, request_bytes(method, path, target.key, b"{}"))
            assert 400 <= reply.status < 500, (method, path, reply)
            assert b"root:" not in reply.body


KEYS = [
    "",
    "x",
    "sk-ajet-",
    "k" * 5000,
    "\xff\xfe",
    "sk-ajet-" + "A" * 60,
    "Bearer",
    "a b",
    "\u00e9".encode().decode("latin-1"),
]


async def test_wrong_keys_are_refused_and_the_right_one_passes(target: Target) -> None:
    for key in [*KEYS, target.key[:-1], target.key + "x", target.key.swapcase(), target.key.replace("-", "_", 1)]:
        reply = await ask(target, target.honest, key=key)
        assert reply.status in (400, 401, 403), (key, reply)
        await still_serves(target)


async def test_two_requests_in_one_and_lengths_that_disagree(target: Target) -> None:
    smuggled = request_bytes("POST", target.path, "x", b"{}")
    for extra in (
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"content-length: -1\r\n",
        b"content-length: +5\r\n",
        b"content-length: 5 5\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(HEAD + b"authorization: Bearer " + target.key.encode() + b"\r\n" + extra + b"\r\n" + smuggled)
        with suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            reply = await asyncio.wait_for(read_reply(reader), 10)
            assert 400 <= reply.status < 500, (extra, reply)
        writer.transport.abort()


async def test_what_follows_a_refusal_is_not_answered_again(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """The refused head and the nonsense behind it arrive together."""

    for head in (b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n", HEAD + b"content-length: 2\r\n\r\n{}"):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(head + b"\x00\xff nonsense\r\n\r\n" * 3)
        reply = await asyncio.wait_for(read_reply(reader), 10)
        assert 400 <= reply.status < 500
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    assert "Fatal error" not in caplog.text, caplog.text
