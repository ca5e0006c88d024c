"""What somebody without a key, or with an episode's, can send to a gateway in a process of its own: its memory stays
flat, and an honest call is answered meanwhile."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from support.raw_http import request_bytes, send

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PROGRAM = """
import asyncio, resource
from ajet.system.http_messages import HttpLimits
from support.gateway_parts import place

resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))  # so that there are 256 places

async def main():
    async with place(limits=HttpLimits(header_deadline_s=2.0, body_deadline_s=2.0)) as here:
        print(here.port, here.key.api_key, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
GROWN = 16 * 1024 * 1024
"""By so much the server may grow: what its places hold."""
ANSWERED_S = 10.0
"""How long an honest call may take on a busy machine. On an idle one it is answered within a few milliseconds."""


class Target(NamedTuple):
    port: int
    key: str
    process: psutil.Process

    @property
    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    async def honest_call(self) -> None:
        async with asyncio.timeout(ANSWERED_S):
            assert (await send(self.port, request_bytes("GET", "/v1/models", self.key))).status == 200


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    tests = Path(__file__).parents[1]
    server = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tests, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port, key = server.stdout.readline().split()
        yield Target(int(port), key, psutil.Process(server.pid))
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def attack(target: Target, attackers: int, one: Callable[[int], Awaitable[None]]) -> None:
    """`attackers` at a time, each until it is cut off, while honest calls are answered."""

    async def main() -> None:
        await target.honest_call()
        before = target.memory
        async with asyncio.timeout(60):
            attacking = asyncio.gather(*(until_cut_off(number) for number in range(attackers)))
            calls = 0
            while calls < 5 or not attacking.done():
                await target.honest_call()
                calls += 1
                assert target.memory - before < GROWN
                await asyncio.sleep(0.05)
            await attacking

    async def until_cut_off(number: int) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await one(number)

    asyncio.run(main())


LONG = b"content-length: 5000\r\n\r\n"
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\r\n",
        b"GET ",
        HEAD,
        HEAD + b"content-length: 5000\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\ncontent-length: 5000\r\n\r\n",
    ],
    ids=["nothing", "an empty line", "half a line", "half a head", "a body", "a body that needs no key"],
)
def test_slow_heads_and_bodies(target: Target, start: bytes, many_files: None) -> None:
    """They hold a place for as long as the deadline allows, and not by dripping on."""

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(start)
        answer = asyncio.ensure_future(reader.read())
        try:
            while not answer.done():
                if start:
                    writer.write(b"\r\n" if start == b"\r\n" else b"x")
                await asyncio.wait([answer], timeout=0.1)
            await answer
        finally:
            writer.close()

    attack(target, 200, one)


@pytest.mark.parametrize("with_key", [False, True], ids=["idle", "slow bodies with a key"])
async def test_a_thousand_connections(target: Target, with_key: bool, many_files: None) -> None:
    before = target.memory
    opened = []
    for _ in range(1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        if with_key:
            writer.write(HEAD + f"authorization: Bearer {target.key}\r\n".encode() + LONG)
        opened.append((reader, writer))
    for _ in range(5):
        await target.honest_call()
    assert target.memory - before < GROWN
    assert target.process.num_fds() < 400, "those who came first made room"
    for _, writer in opened:
        writer.transport.abort()


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_many_pipelined_upgrades(target: Target, offer: str, method: str) -> None:
    one_request = f"{method} /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: {offer}\r\n"
    one_request += "content-length: 2\r\n\r\n{}" if method == "POST" else "\r\n"

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(one_request.encode() * 900)
        assert b" 101 " not in await reader.read()
        writer.close()

    attack(target, 8, one)


def test_requests_without_number_on_one_connection(target: Target) -> None:
    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        for _ in range(20):
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 14_000)
            await writer.drain()
        writer.transport.abort()

    attack(target, 8, one)


async def test_who_reads_nothing_holds_no_place_for_ever(target: Target, many_files: None) -> None:
    before = target.memory
    opened = []
    for _ in range(300):
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 30)
        opened.append(writer)
    for _ in range(5):
        await target.honest_call()
    assert target.memory - before < GROWN
    for writer in opened:
        writer.transport.abort()
