"""An ASGI application behind the HTTP front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ajet.system.http_messages import Answer, HttpLimits, HttpRequest
from ajet.system.http_server import HttpServer
from support.raw_http import read_reply, request_bytes, send
from support.waiting import until

pytestmark = pytest.mark.anyio


class Application:
    """One route for each thing an application can do."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.chunks = 0
        self.afterwards = 0
        self.starlette = Starlette(
            routes=[
                Route("/echo/{name}", self.echo, methods=["GET", "POST"]),
                Route("/stream", self.stream),
                Route("/endless", self.endless),
                Route("/wait", self.wait),
                Route("/raise", self.fail),
                Route("/header", lambda _: Response(headers={"x-split": "a\r\nset-cookie: b"})),
                Route("/cached", lambda _: Response(status_code=304, headers={"etag": "x"})),
                Route("/later", lambda _: Response("now", background=BackgroundTask(self.later))),
            ]
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        try:
            await self.starlette(scope, receive, send)
        finally:
            self.running -= 1

    async def echo(self, request: Request) -> Response:
        about: dict[str, Any] = {
            "name": request.path_params["name"],
            "query": dict(request.query_params),
            "body": (await request.body()).decode(),
            "cookies": request.cookies,
            "client": request.client.host if request.client else None,
            "method": request.method,
        }
        return JSONResponse(about, headers={"vary": "cookie"})

    async def stream(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            for word in ("one", "", "two"):
                await asyncio.sleep(0)
                yield word

        return StreamingResponse(chunks())

    async def endless(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                self.chunks += 1
                yield b"x" * 65_536

        return StreamingResponse(chunks())

    async def wait(self, request: Request) -> Response:
        self.waiting += 1
        await asyncio.Event().wait()
        return Response()

    def fail(self, request: Request) -> Response:
        raise ZeroDivisionError

    async def later(self) -> None:
        await asyncio.sleep(0)
        self.afterwards += 1


class Handler:
    """Leaves every request to the application."""

    def __init__(self, application: Application) -> None:
        self._application = application

    def admit(self, request: HttpRequest) -> Answer | None:
        return None

    async def handle(self, request: HttpRequest) -> Application:
        return self._application

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return Answer(status, f"{message}\n".encode(), {"content-type": "text/plain"})


@asynccontextmanager
async def serving(limits: HttpLimits | None = None) -> AsyncIterator[tuple[Application, int]]:
    application = Application()
    server = HttpServer(Handler(application), limits)
    await server.start("127.0.0.1", 0, "--port")
    try:
        yield application, server.address.port
    finally:
        await server.aclose()


async def test_the_application_sees_the_whole_request() -> None:
    async with serving() as (_, port):
        data = request_bytes("POST", "/echo/%C3%A4%20b?q=%C3%A4&r=1", "", b"body", cookie="a=1; b=2")
        reply = await send(port, data)
        assert reply.json() == {
            "name": "ä b", "query": {"q": "ä", "r": "1"}, "body": "body", "cookies": {"a": "1", "b": "2"},
            "client": "127.0.0.1", "method": "POST",
        }  # fmt: skip
        assert reply.headers["vary"] == "cookie" and reply.headers["content-type"] == "application/json"


async def test_one_connection_carries_streams_and_answers_without_a_body() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for method, path, status, body in (
            ("GET", "/stream", 200, b"one\r\ntwo\r\n"),
            ("GET", "/cached", 304, b""),
            ("GET", "/none", 404, b"Not Found"),
            ("GET", "/echo/x", 200, None),
        ):
            writer.write(request_bytes(method, path, ""))
            reply = await read_reply(reader)
            assert reply.status == status and body in (None, reply.body), path
        writer.write(request_bytes("HEAD", "/echo/x", "") + request_bytes("GET", "/cached", ""))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert (await read_reply(reader)).status == 304, "no body comes between"
        writer.close()


def test_faults_of_the_application_are_500_and_leave_the_server_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            assert (await send(port, request_bytes("GET", "/raise", ""))).status == 500
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # cut off
                await send(port, request_bytes("GET", "/header", ""))
            assert (await send(port, b"GET http://elsewhere/ HTTP/1.1\r\nhost: x\r\n\r\n")).status == 400
            assert (await send(port, request_bytes("GET", "/echo/x", ""))).status == 200

    asyncio.run(run())
    assert "ZeroDivisionError" in caplog.text and "Invalid HTTP header value" in caplog.text


async def test_a_client_that_leaves_ends_what_it_asked_for() -> None:
    async with serving() as (application, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("GET", "/wait", ""))
        await until(lambda: application.waiting)
        writer.close()
        await until(lambda: not application.running)


async def test_a_stream_goes_no_faster_than_its_reader() -> None:
    async with serving() as (application, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("GET", "/endless", ""))
        await reader.readexactly(1)
        sent = -1
        while sent != application.chunks:
            sent = application.chunks
            await asyncio.sleep(0.1)
        assert 0 < sent < 1000
        writer.close()
        await until(lambda: not application.running)


async def test_background_tasks_run_after_the_answer() -> None:
    async with serving() as (application, port):
        assert (await send(port, request_bytes("GET", "/later", ""))).body == b"now"
        await until(lambda: application.afterwards)


async def test_limits_hold_before_the_application_sees_a_request() -> None:
    async with serving(HttpLimits(max_body_bytes=100)) as (_, port):
        reply = await send(port, request_bytes("POST", "/echo/x", "", json.dumps(["x" * 200])))
        assert reply.status == 413 and reply.headers["content-type"].startswith("text/plain")
