"""Both clients name a server that sends nothing, once, on the terminal; what counts as an answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from ajet.system import http_client
from ajet.system.http_client import BoundedClient, HttpClient, SilenceWatch
from support.waiting import wait_until

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class SilentServer:
    """Accepts connections, and answers all of them once it is let."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._connections.append(self._listener.accept()[0])
            except OSError:  # closed
                return

    def answer(self) -> None:
        for connection in self._connections:
            connection.sendall(ANSWER)

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentServer]:
    monkeypatch.setattr(http_client, "SILENT_S", 0.05)
    server = SilentServer()
    yield server
    server.close()


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.message for record in caplog.records if words in record.message]


def test_two_asyncio_requests_to_a_silent_server_name_it_once(
    server: SilentServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> list[str]:
        client = BoundedClient(if_silent="each attempt ends after 600 s")
        asked = [asyncio.create_task(client.get(f"{server.url}/v1/x?y=1")) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: said(caplog, "sent nothing"))
        server.answer()
        answers = [answer.text for answer in await asyncio.gather(*asked)]
        await client.aclose()
        return answers

    assert asyncio.run(scenario()) == ["hi", "hi"]
    (named,) = said(caplog, "sent nothing")
    assert named.startswith(f"{server.url} has sent nothing since ")
    assert named.endswith("and requests wait: each attempt ends after 600 s")
    assert said(caplog, "answers again") == [f"{server.url} answers again"]


def test_a_blocking_request_to_a_silent_server_names_it_and_keeps_its_deadline(
    server: SilentServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = HttpClient(server.url, if_silent="a call ends after 300 s")
    with pytest.raises(http_client.HttpFailure) as caught:
        client.request("GET", "/", timeout_s=0.3)
    assert caught.value.timed_out
    assert len(said(caplog, f"{server.url} has sent nothing since ")) == 1


def test_who_does_not_say_what_happens_then_waits_in_silence(
    server: SilentServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with BoundedClient(timeout=0.3) as client:
            with pytest.raises(httpx.TimeoutException):
                await client.get(server.url)

    asyncio.run(scenario())
    with pytest.raises(http_client.HttpFailure):
        HttpClient(server.url).request("GET", "/", timeout_s=0.3)
    assert not said(caplog, "sent nothing")


def test_a_server_that_answers_others_meanwhile_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = SilenceWatch("http://x", "it ends")
    watch.heard()
    assert 0 < watch.look(waiting_since=0.0) <= http_client.SILENT_S
    assert not said(caplog, "sent nothing")


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n", None),
    ],
)
def test_an_answer_without_a_length_ends_with_its_connection(sent: bytes, body: bytes | None) -> None:
    """As servers made with Python's `http.server` answer. What has a length and breaks off is no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(65536)
                connection.sendall(sent)

        threading.Thread(target=serve).start()
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        if body is not None:
            assert client.request("GET", "/") == (200, body)
            return
        with pytest.raises(http_client.HttpFailure, match="without an answer"):
            client.request("GET", "/")
