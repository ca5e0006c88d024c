"""Large requests are read one at a time, in the turn of their keys, while small ones pass."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from ajet.gateway import turns as turns_module
from ajet.gateway.body_shape import MAX_DEPTH, MAX_NODES
from ajet.gateway.fields import BadField, json_body
from ajet.gateway.turns import LARGE, REST, Turns
from support.gateway_parts import place, post
from support.session_parts import USER

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "word " * LARGE}]}


def test_keys_take_turns_and_a_greedy_one_waits_behind_the_others() -> None:
    async def run() -> None:
        turns, order = Turns(), []

        async def ask(key: str) -> None:
            async with turns.turn(key):
                order.append(key)

        async with turns.turn("first"):
            tasks = [asyncio.create_task(ask(key)) for key in "aaabbc"]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert "".join(order) == "abcaba"
        await asyncio.wait_for(ask("later"), 10)

    asyncio.run(run())


def test_who_gives_up_waiting_costs_nobody_a_turn() -> None:
    async def run() -> None:
        turns, order = Turns(), []

        async def ask(key: str) -> None:
            async with turns.turn(key):
                order.append(key)

        give = turns._next

        def give_and_cancel() -> None:
            give()
            tasks[1].cancel()  # whose turn has just come

        turns._next = give_and_cancel  # type: ignore[method-assign]
        async with turns.turn("first"):
            tasks = [asyncio.create_task(ask(key)) for key in "abcd"]
            await asyncio.sleep(0)
            tasks[0].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert order == ["c", "d"]
        assert not turns._waiting

    asyncio.run(run())


def test_the_loop_is_free_for_a_while_after_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = iter([5.0, 5.25])
        monkeypatch.setattr(turns_module.time, "thread_time", lambda: next(clock))
        loop = asyncio.get_running_loop()
        delays: list[float] = []
        monkeypatch.setattr(loop, "call_later", lambda delay, *_: delays.append(delay))
        async with Turns().turn("a"):
            pass
        assert delays == [REST * 0.25]

    asyncio.run(run())


def test_small_requests_pass_while_large_ones_wait() -> None:
    async def run() -> None:
        async with place() as here:
            async with here.gateway._reader.turns.turn("another"):
                large = asyncio.create_task(post(here, CHAT, LONG))
                while not here.gateway._reader.turns._waiting:
                    await asyncio.sleep(0.001)
                assert (await post(here, CHAT, {"messages": USER})).status == 200
                assert not large.done()
            assert (await large).status == 200

    asyncio.run(run())


def test_a_thread_that_renders_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And threads that compute all the time aren't made to switch often."""
    intervals: list[float] = []

    async def run() -> None:
        async with place() as here:
            length = here.session.prompts._renderer.length

            def rendered(*arguments: Any) -> int:
                intervals.append(sys.getswitchinterval())
                return length(*arguments)

            monkeypatch.setattr(here.session.prompts._renderer, "length", rendered)
            before = sys.getswitchinterval()
            assert (await post(here, CHAT, LONG)).status == 200
            assert sys.getswitchinterval() == before > intervals[0]

    asyncio.run(run())
    assert len(intervals) == 1 and intervals[0] <= 0.001


def nested(depth: int) -> bytes:
    return b'{"a": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (nested(MAX_DEPTH), ""),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (b'{"a": [' + b"[],{}," * 8000 + b"1]}", ""),
        (b'{"a": [' + b"[]," * MAX_NODES + b"1]}", "objects and arrays"),
        (json.dumps({"a": "[{" * MAX_NODES}).encode(), ""),
        (json.dumps({"[" * MAX_NODES: '"[\\' * 5000}).encode(), ""),
        (json.dumps({"a": ['\\"["', "", "[" * 99, "\\", "\\\\[", '"'] * 999}).encode(), ""),
        (b'{"a": "' + b'\\\\", "b": "[' * 1 + b"[" * 99 + b'"}', ""),
        (b"[" * 300, "not JSON"),
        (b"[" * 100_000, "objects and arrays"),
        (b"{[" * 100 + b"]}" * 100, "not JSON"),
        (b'{"a": ' + b"[" * 99, "not JSON"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, bytes) else None,
)
def test_brackets_are_counted_before_a_body_is_decoded(body: bytes, says: str) -> None:
    if not says:
        assert json_body(body) == json.loads(body)
        return
    with pytest.raises(BadField, match=says):
        json_body(body)
