"""Large bodies: checked in a process of its own, which comes back when it is killed and ends with the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ajet.context_tracker import TrackerSettings
from ajet.gateway import body_reader, endpoints
from ajet.gateway.body_reader import CHECKED, PROGRAM, BodyReader
from ajet.gateway.body_shape import Shape, shape_of
from ajet.system.child_process import ChildProcess
from support.gateway_parts import Place, place, post
from support.raw_http import until
from support.session_parts import USER, LineEngine, new_session

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "word " * (CHECKED // 4)}]}
MANY = {"messages": [{"role": "user", "content": "a"}] * 12_000}
SMALL = TrackerSettings(max_model_len=18_000, checks=())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_large_prompt_reaches_the_engine_token_by_token() -> None:
    async def run() -> None:
        async with place() as here:
            assert (await post(here, CHAT, {"messages": USER})).status == 200
            assert here.gateway._reader.pid is None, "small ones need no process"
            assert (await post(here, CHAT, LONG)).status == 200
            pid = here.gateway._reader.pid
            assert pid is not None
            wanted = here.session._renderer.render(LONG["messages"])
            assert here.engine.requests[-1].prompt_ids == wanted
            assert (await post(here, "/v1/completions", {"prompt": wanted, "max_tokens": 3})).status == 200
            assert here.engine.requests[-1].prompt_ids == wanted
            assert here.gateway._reader.pid == pid
        assert gone(pid)

    asyncio.run(run())


TOO_MANY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, MANY),
    ("/v1/messages", {**MANY, "max_tokens": 5}),
    ("/v1/messages/count_tokens", MANY),
    ("/v1/responses", {"input": MANY["messages"]}),
    ("/v1/completions", {"prompt": [1] * 40_000}),
    ("/v1/completions", {"prompt": [[1], [1] * 40_000]}),
]


@pytest.mark.parametrize(("path", "body"), TOO_MANY, ids=[f"{n} {path}" for n, (path, _) in enumerate(TOO_MANY)])
def test_what_has_no_room_never_reaches_the_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with place(tracking=SMALL) as here:
            read: list[object] = []

            async def endpoint(*arguments: object) -> Any:
                read.append(arguments)

            monkeypatch.setitem(endpoints.POST, path, endpoint)
            reply = await post(here, path, body)
            assert reply.status == 400 and "maximum context length is 18000" in reply.body.decode()
            assert not read

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": "' + b"x" * CHECKED, "not JSON"),
        (b"[" + b"1," * CHECKED + b"1]", "must be a JSON object, not array"),
        (b'{"a": ' + b"[" * CHECKED, "objects and arrays"),
        (b'{"a": [' + b"[" * 99 + b"]" * 99 + b'], "b": "' + b"x" * CHECKED + b'"}', "nested deeper"),
        (b'{"a": "' + b"\xff" * CHECKED + b'"}', "not JSON"),
    ],
    ids=["cut short", "array", "brackets", "deep", "not UTF-8"],
)
def test_what_cannot_be_read_is_refused_as_a_small_one_is(body: bytes, says: str) -> None:
    async def run() -> None:
        async with place() as here:
            reply = await post(here, CHAT, body)
            assert reply.status == 400 and says in reply.json()["error"]["message"]
            assert (await post(here, CHAT, LONG)).status == 200

    asyncio.run(run())


def test_a_conversation_is_counted_whatever_protocol_it_is_in() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [*USER, {"role": "assistant", "tool_calls": [call] * 3}, {"role": "tool", "tool_call_id": "a"}, 5]
    assert shape_of(CHAT, {"messages": chat}) == Shape(messages=3, calls=3)
    blocks = [
        {"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "tool_use"}]},
        {"role": "user", "content": [{"type": "tool_result"}, {"type": "tool_result"}, 5]},
    ]
    assert shape_of("/v1/messages", {"messages": blocks}) == Shape(messages=3, calls=1)
    items = [*USER, {"type": "reasoning"}, {"role": "assistant"}, {"type": "function_call"}]
    assert shape_of("/v1/responses", {"input": [*items, {"type": "function_call_output"}]}) == Shape(2, 1)
    assert shape_of("/v1/completions", {"prompt": [1, 2]}) == Shape(tokens=2)
    for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/completions"):
        for odd in (None, 5, "x", {}, [[]], [None], ["a", [1]]):
            assert shape_of(path, {"messages": odd, "input": odd, "prompt": odd}).tokens in (0, 1)


# ---------------------------------------------------------------- the process


async def started(here: Place) -> int:
    assert (await post(here, CHAT, LONG)).status == 200
    pid = here.gateway._reader.pid
    assert pid is not None
    return pid


def test_one_that_was_killed_is_started_again() -> None:
    async def run() -> None:
        async with place() as here:
            pid = await started(here)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid))
            assert (await post(here, CHAT, LONG)).status == 200
            assert here.gateway._reader.pid not in (None, pid)

    asyncio.run(run())


def test_one_that_is_killed_during_a_check_checks_again() -> None:
    async def run() -> None:
        async with place() as here:
            pid = await started(here)
            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.create_task(post(here, CHAT, LONG))
            await until(lambda: here.gateway._reader._checks._taken)
            assert (await post(here, CHAT, {"messages": USER})).status == 200, "small ones go on"
            os.kill(pid, signal.SIGKILL)
            assert (await waiting).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_one_that_never_answers_or_always_ends_is_a_503(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with place() as here:
            pid = await started(here)
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(body_reader, "ANSWER_S", 0.05)
            reply = await post(here, path, LONG)
            assert reply.status == 503 and "try again" in reply.json()["error"]["message"]
            assert reply.headers["x-should-retry"] == "true" and "retry-after" in reply.headers
            assert gone(pid)
            monkeypatch.setattr(body_reader, "ANSWER_S", 20.0)
            monkeypatch.setattr(body_reader, "PROGRAM", Path("/dev/null"))
            assert (await post(here, path, LONG)).status == 503
            monkeypatch.setattr(body_reader, "PROGRAM", PROGRAM)
            assert (await post(here, CHAT, LONG)).status == 200

    asyncio.run(run())


def test_closing_the_gateway_during_a_check_ends_both() -> None:
    async def run() -> None:
        async with place() as here:
            pid = await started(here)
            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.create_task(post(here, CHAT, LONG))
            await until(lambda: here.gateway._reader._checks._taken)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await waiting
        assert gone(pid) and here.gateway._reader.pid is None

    asyncio.run(run())


def test_each_key_has_its_turn() -> None:
    async def run() -> None:
        reader, order, go_on = BodyReader(), [], threading.Event()
        sessions = {key: new_session(LineEngine("hi")) for key in "abc"}
        ask = reader._ask

        def asked(path: str, body: bytes) -> bytes:
            assert go_on.wait(30)
            order.append(path)
            return ask(CHAT, body)

        reader._ask = asked  # type: ignore[method-assign]
        body = json.dumps(LONG).encode()
        tasks = []
        for key in "aaabbc":
            tasks.append(asyncio.create_task(reader.read(key, body, sessions[key])))
            await asyncio.sleep(0)
        go_on.set()
        assert await asyncio.gather(*tasks) == [LONG] * 6
        assert "".join(order) == "aabcab"
        await reader.aclose()

    asyncio.run(run())


def test_it_ends_with_a_gateway_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ajet.system.child_process import ChildProcess\n"
        f"child = ChildProcess(Path({str(PROGRAM)!r}))\n"
        "child.ask(b'2 /v1/x\\n{}', 60)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    asyncio.run(until(lambda: gone(pid)))


def test_a_child_is_asked_from_a_process_with_many_files() -> None:
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    high = os.dup2(files[0], 1100) if os.sysconf("SC_OPEN_MAX") > 1200 else None
    child = ChildProcess(PROGRAM)
    try:
        if high is not None:
            child._answers = os.dup2(child._answers, 1101)
        assert json.loads(child.ask(b"2 /v1/x\n{}", 60))["shape"] is not None
    finally:
        child.end()
        for file in [*files, *([high, child._answers] if high is not None else [])]:
            os.close(file)
