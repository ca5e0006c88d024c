"""Slow, greedy and broken clients against the HTTP front alone: refused with the right status, within the limits."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import resource
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.system.http_messages import (
    Answer,
    HttpLimits,
    HttpRequest,
    event_stream,
    json_answer,
)
from ajet.system.http_server import AddressError, HttpServer, listen
from support.raw_http import read_reply, request_bytes, send
from support.waiting import until

pytestmark = pytest.mark.anyio

KEY = "right"
BODY = {"some": "thing"}


class Echo:
    """Gives a body back, whole or as a stream; or waits, or fails, as its path says."""

    def __init__(self) -> None:
        self.handled = 0
        self.waiting = 0
        self.cancelled = 0
        self.closed = 0
        self.server: HttpServer | None = None

    def admit(self, request: HttpRequest) -> Answer | None:
        if request.headers.get(b"authorization") != b"Bearer " + KEY.encode():
            return self.refuse(request, 401, "key", "wrong key")
        return None

    async def handle(self, request: HttpRequest) -> Answer:
        if request.path == "/wait":
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if request.path == "/raise":
            raise ZeroDivisionError
        if request.path == "/header":
            return Answer(200, b"", {"x-asked": request.body.decode()})
        if request.path == "/nothing":
            return Answer(204, b"")
        self.handled += 1
        if request.path.startswith("/stream"):
            return event_stream(self._stream(request), self._close)
        return Answer(200, request.body, {"x-query": request.query.decode(), "x-client": str(request.client)})

    async def _stream(self, request: HttpRequest) -> AsyncIterator[bytes]:
        for chunk in (request.body[:3], b"", request.body[3:]):
            yield chunk
        if request.path == "/stream/raise":
            raise ZeroDivisionError
        if request.path == "/stream/wait":
            self.waiting += 1
            await asyncio.Event().wait()
        yield b"end"

    def _close(self) -> None:
        self.closed += 1

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return json_answer({"code": code, "message": message}, status)


@asynccontextmanager
async def serving(limits: HttpLimits | None = None) -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    server = echo.server = HttpServer(echo, limits)
    await server.start("127.0.0.1", 0, "--port")
    try:
        yield echo, server.address.port
    finally:
        await server.aclose()


# ---------------------------------------------------------------- whole answers


async def test_no_header_of_an_answer_can_begin_another() -> None:
    async with serving() as (_, port):
        for value in ('"a\\r\\nset-cookie: b"', '"a\\nb"'):
            body = json.loads(value)
            head = f"POST /header HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            reply = await send(port, (head + body).encode())
            assert reply.status == 500 and "set-cookie" not in reply.headers


async def test_an_answer_without_a_body_has_none() -> None:
    async with serving() as (_, port):
        head = f" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"HEAD /x{head}\r\nGET /nothing{head}\r\nGET /x{head}connection: close\r\n\r\n".encode())
        said = (await reader.read()).decode()
        writer.close()
    first, second, third = said.split("HTTP/1.1 ")[1:]
    assert first.startswith("200") and "content-length: 0" in first and first.endswith("\r\n\r\n")
    assert second.startswith("204") and "content-length" not in second and second.endswith("\r\n\r\n")
    assert third.startswith("200") and "connection: close" in third


# ---------------------------------------------------------------- slow clients


async def test_slow_clients_are_cut_while_honest_ones_are_served() -> None:
    async def drip(port: int, start: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        answer = asyncio.ensure_future(reader.read())
        try:
            while not answer.done():
                writer.write(b"x")
                await asyncio.wait([answer], timeout=0.1)
        finally:
            writer.close()
        return answer.result()

    async with serving(HttpLimits(header_deadline_s=0.6, body_deadline_s=0.6)) as (echo, port):
        head = f"POST / HTTP/1.1\r\nauthorization: Bearer {KEY}\r\n"
        starts = [b"POST / HTTP/1.1\r\nx-", b"", f"{head}content-length: 5000\r\n\r\n".encode()] * 40
        slow = [asyncio.ensure_future(drip(port, start)) for start in starts]
        for _ in range(20):
            assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200
        _, pending = await asyncio.wait(slow, timeout=8)
        assert not pending
        answers = [task.result() for task in slow]
        assert all(b" 408 " in answer or b" 400 " in answer or not answer for answer in answers)
        assert all(b" 408 " in answer for answer in answers[2::3])
        assert echo.handled == 20


# ---------------------------------------------------------------- bodies


async def test_who_is_refused_before_its_body_came_is_told_that_the_connection_ends() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("POST", "/", "wrong", BODY)[:-2])
        refused = await asyncio.wait_for(read_reply(reader), 10)
        assert (refused.status, refused.headers.get("connection")) == (401, "close")
        writer.close()
        assert "connection" not in (await send(port, request_bytes("POST", "/", KEY, BODY))).headers
        # what comes after the answer ends the connection as well
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("POST", "/", KEY, BODY) + b"NONSENSE\r\n\r\n")
        said = (await asyncio.wait_for(reader.read(), 10)).decode()
        assert said.count("HTTP/1.1 200") == 1 and "connection: close" in said
        writer.close()


def test_a_client_that_goes_while_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the socket says when a reset arrives between reading and answering is no error of ours."""

    def gone(transport: Any) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def run() -> None:
        async with serving() as (_, port):
            with monkeypatch.context() as patch:
                patch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", gone)
                assert (await send(port, request_bytes("POST", "/", "wrong", BODY))).status == 401
            assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200

    asyncio.run(run())
    assert not caplog.records


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def test_oversized_bombed_and_truncated_bodies() -> None:
    async with serving(HttpLimits(max_body_bytes=1_000_000)) as (echo, port):
        bomb = gzip.compress(b" " * 200_000_000, 9)
        plain = json.dumps(BODY).encode()
        before = peak_mb()
        cases: list[tuple[bytes, int]] = [
            (request_bytes("POST", "/", KEY, b"x" * 1_000_001), 413),
            (request_bytes("POST", "/", "wrong", b"x" * 1_000_001), 401),
            (request_bytes("POST", "/", KEY, bomb, content_encoding="gzip"), 413),
            (request_bytes("POST", "/", KEY, gzip.compress(b"{}")[:-4], content_encoding="gzip"), 400),
            (request_bytes("POST", "/", KEY, b"not gzip", content_encoding="gzip"), 400),
            (request_bytes("POST", "/", KEY, b"{}", content_encoding="br"), 415),
            (request_bytes("POST", "/", KEY, BODY, x_big="y" * 40_000), 431),
            (b"NONSENSE\r\n\r\n", 400),
            (b"CONNECT example.org:80 HTTP/1.1\r\n\r\n", 400),
            (request_bytes("POST", "/", KEY, gzip.compress(plain), content_encoding="gzip"), 200),
            (request_bytes("POST", "/", KEY, zlib.compress(plain), content_encoding="deflate"), 200),
        ]
        for number, (data, status) in enumerate(cases):
            reply = await send(port, data)
            assert reply.status == status, (number, reply)
            assert status != 200 or reply.json() == BODY
        endless = f"POST / HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        reply = await send(port, endless + b"10000\r\n" + (b"x" * 0x10000 + b"\r\n10000\r\n") * 30)
        assert reply.status == 413
        assert peak_mb() - before < 64
        assert echo.handled == 2


async def test_large_bodies_share_one_allowance() -> None:
    limits = HttpLimits(max_body_bytes=1_000_000, max_buffered_bytes=1_500_000)
    async with serving(limits) as (echo, port):
        whole = request_bytes("POST", "/", KEY, b"x" * 900_000)
        held, held_writer = await asyncio.open_connection("127.0.0.1", port)
        held_writer.write(whole[:-1])
        server = echo.server
        assert server is not None
        await until(lambda: server._buffered == 899_999)
        reply = await send(port, whole)
        assert (reply.status, reply.json()["code"]) == (429, "overloaded")
        assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200, "small ones still pass"
        held_writer.write(whole[-1:])
        assert (await read_reply(held)).status == 200
        held_writer.close()
        assert (await send(port, whole)).status == 200


@pytest.mark.parametrize("endless", [b"x-trailer: " + b"y" * 999 + b"\r\n", b"y" * 999, b"x: y\r\n" * 99])
async def test_trailers_without_end_are_refused(endless: bytes) -> None:
    async with serving() as (echo, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST / HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        writer.write(head + b"5\r\nhello\r\n0\r\n" + (b"" if endless.startswith(b"x") else b"x: "))
        answer = asyncio.ensure_future(reader.read())
        sent = 0
        while not answer.done() and sent < 3_000_000:
            writer.write(endless)
            sent += len(endless)
            await asyncio.wait([answer], timeout=0)
        assert b" 431 " in await asyncio.wait_for(answer, 5)
        assert echo.handled == 0
        writer.close()
        trailers = head + b"5\r\nhello\r\n0\r\nauthorization: Bearer wrong\r\nx: y\r\n\r\n"
        assert (await send(port, trailers)).body == b"hello", "a few do no harm"


async def test_who_has_no_key_gets_little_memory() -> None:
    class Open(Echo):
        def admit(self, request: HttpRequest) -> Answer | None:
            request.unauthenticated = request.path == "/healthz"
            return None

    server = HttpServer(Open())
    await server.start("127.0.0.1", 0, "--port")
    port = server.address.port
    assert (await send(port, request_bytes("POST", "/healthz", "", b"x" * 65_537))).status == 413
    assert (await send(port, request_bytes("POST", "/healthz", "", b"x" * 65_536))).status == 200
    bomb = gzip.compress(b" " * 1_000_000)
    assert (await send(port, request_bytes("POST", "/healthz", "", bomb, content_encoding="gzip"))).status == 413
    assert (await send(port, request_bytes("POST", "/", "", b"x" * 1_000_000))).status == 200
    await server.aclose()


# ---------------------------------------------------------------- many connections


async def leaves(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed this connection."""
    try:
        return not await asyncio.wait_for(reader.read(1), 0.2)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
async def test_idle_strangers_push_out_only_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.system.http_protocol.most_connections", lambda: 40)
    async with serving() as (_, port):
        known = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for reader, writer in known:
            writer.write(request_bytes("POST", "/", KEY, BODY))
            assert (await read_reply(reader)).status == 200
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200, "there is room to begin"
        gone = [await leaves(reader) for reader, _ in strangers]
        assert sum(gone) >= 90, "who came first makes room"
        held = 0
        for reader, writer in known:
            writer.write(request_bytes("POST", "/", KEY, BODY))
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                held += (await read_reply(reader)).status == 200
        assert held >= 29, "the known ones stay, but for the idle one whose place the newcomer took"
        for _, writer in (*known, *strangers):
            writer.close()


async def test_known_clients_at_work_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.system.http_protocol.most_connections", lambda: 8)
    async with serving() as (echo, port):
        busy = [asyncio.ensure_future(send(port, request_bytes("POST", "/wait", KEY))) for _ in range(6)]
        await until(lambda: echo.waiting == 6)
        reply = await send(port, request_bytes("POST", "/", KEY, BODY))
        assert (reply.status, reply.json()["code"]) == (429, "overloaded")
        for task in busy:
            assert not task.done()
            task.cancel()
        await until(lambda: echo.cancelled == 6)
        assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200


# ---------------------------------------------------------------- HTTP itself


async def test_one_connection_many_requests() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        one = request_bytes("POST", "/path?a=1&b=%20", KEY, BODY)
        writer.write(one * 20)  # pipelined
        for _ in range(20):
            reply = await read_reply(reader)
            assert (reply.status, reply.json(), reply.headers["x-query"]) == (200, BODY, "a=1&b=%20")
            assert reply.headers["x-client"] == str(writer.get_extra_info("sockname"))
        for part in (one[:30], one[30:90], one[90:-3], one[-3:]):
            writer.write(part)
            await asyncio.sleep(0.01)  # so that they arrive apart
        assert (await read_reply(reader)).status == 200
        chunked = b"5\r\nhello\r\n0\r\n\r\n"
        head = f"POST /stream HTTP/1.1\r\nauthorization: Bearer {KEY}\r\n"
        writer.write(
            f"{head}transfer-encoding: chunked\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n".encode() + chunked
        )
        streamed = await read_reply(reader)
        assert (streamed.status, streamed.body) == (200, b"hel\r\nlo\r\nend\r\n"), "an empty chunk ends nothing"
        writer.write(f"{head}expect: 100-continue\r\ncontent-length: 5\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await read_reply(reader)).status == 200
        for path in ("/", "/stream"):
            writer.write(request_bytes("HEAD", path, KEY))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "and no body"
        writer.write(one)
        assert (await read_reply(reader)).status == 200
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("POST", "/stream", KEY, b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await reader.read()).endswith(b"\r\n\r\nhelloend")
        writer.close()


@pytest.mark.parametrize("path", ["/wait", "/stream/wait"])
async def test_a_client_that_leaves_cancels_what_it_asked_for(path: str) -> None:
    async with serving() as (echo, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("POST", path, KEY, BODY))
        await until(lambda: echo.waiting)
        writer.close()
        await until(lambda: echo.cancelled + echo.closed)


async def test_a_handler_that_raises_costs_one_answer_not_the_server() -> None:
    async with serving() as (_, port):
        reply = await send(port, request_bytes("POST", "/raise", KEY, BODY))
        assert (reply.status, reply.json()["code"]) == (500, "internal_error")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # cut off, never taken for complete
            await send(port, request_bytes("POST", "/stream/raise", KEY, BODY))
        assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200


async def test_closing_the_server_cuts_all_connections() -> None:
    async with serving() as (echo, port):
        waiting = asyncio.ensure_future(send(port, request_bytes("POST", "/wait", KEY, BODY)))
        await until(lambda: echo.waiting)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await waiting
    assert echo.cancelled == 1


# ---------------------------------------------------------------- addresses


def test_an_address_that_cannot_be_served_says_why() -> None:
    with listen("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"on 127.0.0.1:{port}: Address already in use. Change --port"):
            listen("127.0.0.1", port, "--port")
    with pytest.raises(AddressError, match="a number from 0 to 65535"):
        listen("127.0.0.1", 65_536, "--port")
    with pytest.raises(AddressError, match=r"can't listen on no\.such\.host\.invalid:0"):
        listen("no.such.host.invalid", 0, "--port")


# ---------------------------------------------------------------- fuzzing


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [
                    b"\r\n",
                    b"POST ",
                    b" HTTP/1.1\r\n",
                    b"content-length: 3\r\n",
                    b"transfer-encoding: chunked\r\n",
                    b"authorization: Bearer " + KEY.encode() + b"\r\n",
                    b"\r\n\r\n",
                ]
            ),
        ),
        max_size=12,
    )
)
async def test_no_bytes_make_the_server_fail(pieces: list[bytes]) -> None:
    async with serving(HttpLimits(header_deadline_s=0.01, body_deadline_s=0.01)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(pieces))
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b" 500 " not in answer
        writer.close()
        assert (await send(port, request_bytes("POST", "/", KEY, BODY))).status == 200


async def test_large_bodies_that_come_together_all_come_whole() -> None:
    async with serving() as (_, port):
        bodies = [bytes([number]) * 1_000_003 for number in range(8)]
        replies = await asyncio.gather(*(send(port, request_bytes("POST", "/", KEY, body)) for body in bodies))
        assert [reply.body for reply in replies] == bodies
