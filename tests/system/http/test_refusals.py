"""Who is refused again and again waits for it; nobody else does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from ajet.system.http.answer import Answer, json_answer
from ajet.system.http.connection import HttpRequest
from ajet.system.http.refusals import FREE, LONGEST_PAUSE_S, PER_SECOND, Refusals
from ajet.system.http.server import HttpServer
from support.raw_http import read_reply, request_bytes, send


def test_a_burst_is_free_and_the_rest_comes_at_a_rate() -> None:
    refusals = Refusals()
    assert [refusals.pause("a", 0.0) for _ in range(FREE)] == [0.0] * FREE
    waits = [refusals.pause("a", 0.0) for _ in range(3)]
    assert waits == pytest.approx([1 / PER_SECOND, 2 / PER_SECOND, 3 / PER_SECOND])
    assert refusals.pause("b", 0.0) == 0.0


def test_who_asks_less_often_never_waits() -> None:
    refusals = Refusals()
    assert all(refusals.pause("a", n / PER_SECOND) == 0.0 for n in range(10 * FREE))


def test_a_pause_has_an_end_and_payers_are_forgotten() -> None:
    refusals = Refusals()
    assert max(refusals.pause("a", 0.0) for _ in range(1000)) == pytest.approx(LONGEST_PAUSE_S)
    refusals.sweep(0.0)
    assert len(refusals) == 1
    refusals.sweep(FREE / PER_SECOND + LONGEST_PAUSE_S)
    assert len(refusals) == 0


def test_strangers_wait_for_nothing() -> None:
    refusals = Refusals()
    assert {refusals.pause(None, 0.0) for _ in range(10 * FREE)} == {0.0}
    assert len(refusals) == 0


class Picky:
    """Refuses early what goes to /early, and late what goes to /late."""

    def admit(self, request: HttpRequest) -> Answer | None:
        request.payer = request.headers[b"authorization"]
        return self.refuse(request, 404, "no", "no") if request.path == "/early" else None

    async def handle(self, request: HttpRequest) -> Answer:
        return self.refuse(request, 422 if request.path == "/late" else 200, "no", "no")

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return json_answer({"code": code}, status)


@pytest.mark.parametrize("path", ["/early", "/late"])
def test_a_refusal_waits_while_others_are_served(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server = HttpServer(Picky())
        await server.start("127.0.0.1", 0, "--port")
        port = server.address.port
        pauses: list[float] = []
        try:
            note = Refusals.pause

            def noted(self: Refusals, payer: Any, now: float) -> float:
                pause = note(self, payer, now)
                pauses.append(pause)
                return pause

            monkeypatch.setattr(Refusals, "pause", noted)
            statuses = [(await send(port, request_bytes("POST", path, "a", b"x"))).status for _ in range(FREE)]
            assert set(statuses) == {404 if path == "/early" else 422}
            _, gone = await asyncio.open_connection("127.0.0.1", port)
            gone.write(request_bytes("POST", path, "a", b"x" * 100_000))
            gone.close()  # its answer waits for nobody
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("POST", path, "a", b"x" * 100_000))
            late = asyncio.ensure_future(read_reply(reader))
            for key in "ab":
                assert (await send(port, request_bytes("POST", "/", key, b"x"))).status == 200
            assert not late.done()
            assert (await asyncio.wait_for(late, 30)).status == statuses[0]
            assert pauses[-1] > 0.0
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        finally:
            await server.aclose()

    monkeypatch.setattr("ajet.system.http.refusals.PER_SECOND", 2.0)
    asyncio.run(run())
    (told,) = caplog.messages
    assert "again and again" in told
    assert path in told
