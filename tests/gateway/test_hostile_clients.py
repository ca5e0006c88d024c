"""Wrong keys, slow, greedy and broken clients: refused with the right status, and nothing of them is recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet.context_tracker import TrackerSettings
from ajet.gateway import anthropic_messages
from ajet.gateway.chat import episode_session
from ajet.gateway.endpoints import POST
from ajet.gateway.protocol import BadField, Caller, agent_key, read_model, read_tool_choice
from ajet.gateway.responses_items import read_input, read_tools
from ajet.system.http_messages import HttpLimits, KeyRing, narrow
from support.gateway_parts import place, post
from support.raw_http import read_reply, request_bytes, send
from support.session_parts import USER, LineEngine, aborted, replied
from support.waiting import until

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": USER}


# ---------------------------------------------------------------- keys


def wrong_keys(right: str, count: int) -> list[str]:
    """Forged, damaged, truncated, foreign, expired and widened keys."""
    draw = random.Random(0)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    foreign = KeyRing(100, "")
    mine = agent_key(right, "a", "t")
    keys = ["sk-ajet-", "", "Bearer", "sk-1", right.upper(), right[:-1], right + "A", f"{right}.x.y", "sk-ajet-é" * 9]
    while len(keys) < count:
        kind = len(keys) % 7
        if kind == 0:
            keys.append("sk-ajet-" + "".join(draw.choices(alphabet, k=60)))
        elif kind == 1:
            at = draw.randrange(8, len(right))
            keys.append(right[:at] + draw.choice(alphabet.replace(right[at], "")) + right[at + 1 :])
        elif kind == 2:
            keys.append(right[: draw.randrange(len(right))])
        elif kind == 3:
            keys.append(foreign.issue()[1])
        elif kind == 4:  # another agent's name over this one's signature
            head, _, signature = mine.split(".")
            keys.append(f"{head}.{agent_key(right, str(len(keys)), 't').split('.')[1]}.{signature}")
        elif kind == 5:  # an agent's signature as the episode's
            head, _, signature = mine.split(".")
            keys.append(head + signature)
        else:
            at = draw.randrange(8, len(mine))
            keys.append(mine[:at] + draw.choice(alphabet.replace(mine[at], "")) + mine[at + 1 :])
    return keys


def test_wrong_keys_are_refused_and_leave_no_trace() -> None:
    async def run() -> None:
        async with place() as here:
            keys = wrong_keys(here.key.api_key, 2000)
            statuses: dict[int, int] = {}

            async def try_some(some: list[str]) -> None:
                for key in some:
                    data = request_bytes("POST", CHAT, key.encode("utf-8").decode("latin-1"), BODY)
                    reply = await send(here.port, data)
                    statuses[reply.status] = statuses.get(reply.status, 0) + 1

            await asyncio.gather(*(try_some(keys[start::20]) for start in range(20)))
            assert statuses == {401: 2000}
            assert here.session.tracker.calls == [] and not here.engine.requests
            assert (await post(here, CHAT, BODY)).status == 200

    asyncio.run(run())


def test_keys_of_expired_finished_and_other_episodes() -> None:
    async def run() -> None:
        async with place(key_ttl_s=-1) as here:
            reply = await post(here, CHAT, BODY)
            assert reply.status == 401 and "expired" in reply.json()["error"]["message"]
        async with place() as here:
            mine = agent_key(here.key.api_key, "solver", "t")
            assert (await post(here, CHAT, {**BODY, "model": "ajet/critic"}, mine)).status == 403
            assert (await post(here, CHAT, {**BODY, "model": "gpt-4o"}, mine)).status == 200
            assert [call.agent for call in here.session.tracker.calls] == ["solver"]
            assert (await post(here, CHAT, {**BODY, "model": "ajet/critic"})).status == 200
            here.session.revoke()
            for key in (here.key.api_key, mine, here.key.control_key):
                reply = await post(here, CHAT, BODY, key)
                assert reply.status == 409 and reply.headers["x-should-retry"] == "false"
            assert len(here.session.tracker.calls) == 2

    asyncio.run(run())


def test_only_the_control_key_gives_rewards() -> None:
    async def run() -> None:
        async with place() as here:
            control = here.key.control_key
            mine = agent_key(here.key.api_key, "solver", "t")
            call = (await post(here, CHAT, BODY, mine)).json()["id"]
            for body in ({"reward": 1000}, {"reward": 1000, "call": call}, {"reward": 1000, "agent": "solver"}):
                for key in (mine, here.key.api_key, agent_key(control, "solver", "t")):
                    assert (await post(here, "/v1/rewards", body, key)).status in (401, 403, 409)
            assert (await post(here, CHAT, BODY, control)).status == 403
            assert len(here.session.tracker.calls) == 1
            finished = here.session.tracker.finish(0.0)
            assert (finished.reward, finished.agent_rewards) == (0.0, {})
            assert [one.reward for one in finished.tree.calls] == [None]
        async with place() as here:
            call = (await post(here, CHAT, {**BODY, "model": "ajet-solver"})).json()["id"]
            for body in ({"reward": 0.5}, {"reward": 0.25, "call": call}, {"reward": 0.75, "agent": "solver"}):
                assert (await post(here, "/v1/rewards", body, here.key.control_key)).status == 200
            assert (await post(here, "/v1/rewards", {"reward": 1, "call": "x"}, here.key.control_key)).status == 400
            finished = here.session.tracker.finish(None)
            assert (finished.reward, finished.agent_rewards) == (0.5, {"solver": 0.75})
            assert [one.reward for one in finished.tree.calls] == [0.25]

    asyncio.run(run())


@pytest.mark.parametrize("scope", [5, "x", [1, 2], ["a"], {"a": 1}, [["a"], None], None])
def test_scopes_written_by_hand_are_refused(scope: object) -> None:
    async def run() -> None:
        async with place() as here:
            key = narrow(here.key.api_key, scope)
            assert (await post(here, CHAT, BODY, key)).status == (200 if scope is None else 401)

    asyncio.run(run())


def test_huge_numbers_are_refused_by_name() -> None:
    async def run() -> None:
        async with place() as here:
            body = json.dumps({**BODY, "temperature": 1}).replace('"temperature": 1', '"temperature": 1' + "0" * 400)
            reply = await send(here.port, request_bytes("POST", CHAT, here.key.api_key, body.encode()))
            assert reply.status == 400, reply

    asyncio.run(run())


def test_errors_have_the_shape_of_the_protocol() -> None:
    async def run() -> None:
        async with place() as here:
            reply = await post(here, "/v1/messages", {"messages": USER})
            assert reply.status == 400
            error = reply.json()
            assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
            reply = await post(here, "/v1/messages", {}, "wrong")
            assert (reply.status, reply.json()["error"]["type"]) == (401, "authentication_error")
            reply = await post(here, "/v1/messages/count_tokens", {"messages": []})
            assert (reply.status, reply.json()["type"]) == (400, "error")
            reply = await post(here, CHAT, {"messages": []})
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert reply.json()["error"]["param"] == "messages"
            assert (await post(here, "/v1/moderations", {})).status == 404
            reply = await post(here, "/v1/episodes", {})  # this run plays its own
            assert reply.status == 404 and "there is no /v1/episodes" in reply.json()["error"]["message"]
            assert (await send(here.port, request_bytes("GET", CHAT, "k"))).status == 405
            assert (await send(here.port, request_bytes("GET", "/healthz", ""))).json() == {"status": "ok"}

    asyncio.run(run())


# ---------------------------------------------------------------- bodies


def test_bodies_that_are_no_request() -> None:
    async def run() -> None:
        async with place(limits=HttpLimits(max_body_bytes=1_000_000)) as here:
            key = here.key.api_key
            deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
            cases: list[tuple[bytes, int]] = [
                (b"x" * 1_000_001, 413),
                (deep, 400),
                (json.dumps({"messages": USER, "x": [[]] * 200}).encode(), 200),
                (b"", 400),
            ]
            for number, (body, status) in enumerate(cases):
                reply = await send(here.port, request_bytes("POST", CHAT, key, body))
                assert reply.status == status, (number, reply)
            assert reply.json()["error"]["type"] == "invalid_request_error"
            good = request_bytes("POST", CHAT, key, gzip.compress(json.dumps(BODY).encode()), content_encoding="gzip")
            assert (await send(here.port, good)).status == 200
            assert len(replied(here.session)) == 2

    asyncio.run(run())


# ---------------------------------------------------------------- HTTP itself


def test_one_connection_many_requests() -> None:
    async def run() -> None:
        async with place() as here:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(request_bytes("POST", CHAT, here.key.api_key, BODY) * 20)  # pipelined
            for _ in range(20):
                assert (await read_reply(reader)).status == 200
            body = json.dumps({**BODY, "stream": True})
            head = f"POST {CHAT} HTTP/1.1\r\nx-api-key: {here.key.api_key}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            streamed = await read_reply(reader)
            assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n\r\n")
            writer.close()
            old = request_bytes("POST", "/v1/v1/chat/completions/", here.key.api_key, {**BODY, "stream": True})
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(old.replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert (await reader.read()).endswith(b"data: [DONE]\n\n")
            writer.close()

    asyncio.run(run())


def test_more_at_once_than_run_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.gateway.gateway.MOST_CALLS", 6)

    async def run() -> None:
        engine = LineEngine("hi", gate=asyncio.Event())
        async with place(engine, max_concurrent_per_episode=4) as here:
            running = [asyncio.ensure_future(post(here, CHAT, {**BODY, "stream": i % 2 == 0})) for i in range(4)]
            await until(lambda: len(engine.requests) == 4)
            _, gone = await asyncio.open_connection("127.0.0.1", here.port)
            gone.write(request_bytes("POST", CHAT, here.key.api_key, BODY))
            await until(lambda: here.gateway._calls[here.session].count == 5)
            gone.close()
            await until(lambda: here.gateway._calls[here.session].count == 4)
            waiting = [asyncio.ensure_future(post(here, CHAT, BODY)) for _ in range(2)]
            await until(lambda: here.gateway._calls[here.session].count == 6)
            reply = await post(here, CHAT, BODY)
            assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "rate_limit_error"
            assert len(engine.requests) == 4 and engine.gate is not None
            engine.gate.set()
            assert [reply.status for reply in await asyncio.gather(*running, *waiting)] == [200] * 6
            assert here.gateway._calls[here.session].count == 0

    asyncio.run(run())


def test_without_a_key_only_this_machines_names_are_served() -> None:
    """A web page whose name is made to lead to 127.0.0.1 sends that name."""

    async def status(port: int, host: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    async def run() -> None:
        async with place(LineEngine("hi"), without_key=True) as here:
            for host in ("evil.example", f"evil.example:{here.port}", "127.0.0.1.evil.example", ""):
                assert b"only requests to localhost are served" in await status(here.port, host)
            for host in ("localhost", f"127.0.0.1:{here.port}", f"[::1]:{here.port}"):
                assert b"only requests to localhost" not in await status(here.port, host)

    asyncio.run(run())


def test_completions_of_many_prompts_are_bounded_before_any_work() -> None:
    async def run() -> None:
        engine = LineEngine("hi")
        async with place(engine) as here:
            body = {"model": "m", "prompt": [[7] * 100] * 64, "n": 64, "max_tokens": 1}
            reply = await post(here, "/v1/completions", body)
            assert reply.status == 400 and "prompts of 409600 tokens" in reply.json()["error"]["message"]
            assert not engine.requests

    asyncio.run(run())


def test_the_choices_of_a_token_prompt_share_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with place(LineEngine("hi")) as here:
            decode, read = here.session._renderer.decode, []

            def watched(ids: Sequence[int], **more: Any) -> str:
                read.append(len(ids))
                return decode(ids, **more)

            monkeypatch.setattr(here.session._renderer, "decode", watched)
            reply = await post(here, "/v1/completions", {"model": "m", "prompt": [7] * 9000, "n": 64, "max_tokens": 1})
            assert reply.status == 200 and len(reply.json()["choices"]) == 64
            assert [size for size in read if size > 1000] == [9000]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_ends_cancels_what_was_asked_on_it(stream: bool) -> None:
    async def run() -> None:
        engine = LineEngine("hi", gate=asyncio.Event())
        async with place(engine) as here:
            _, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(request_bytes("POST", CHAT, here.key.api_key, {**BODY, "stream": stream, "n": 3}))
            await until(lambda: len(engine.requests) == 3)
            writer.close()
            await until(lambda: len(aborted(here.session)) == 3)
            assert engine.cancelled == 3 and aborted(here.session) == ["cancelled"] * 3

    asyncio.run(run())


def test_closing_the_gateway_cuts_everybody() -> None:
    async def run() -> None:
        engine = LineEngine("hi", gate=asyncio.Event())
        async with place(engine) as here:
            waiting = asyncio.ensure_future(post(here, CHAT, BODY))
            await until(lambda: engine.requests)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await waiting
        assert engine.cancelled == 1

    asyncio.run(run())


# ---------------------------------------------------------------- fuzzing

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=9),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=8,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "x"])
part = st.one_of(
    anything,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "tool_use", "tool_result", "thinking", "refusal"])},
        optional={
            key: st.one_of(st.text(max_size=5), anything)
            for key in ("text", "id", "name", "input", "tool_use_id", "content")
        },
    ),
)
function = st.fixed_dictionaries(
    {}, optional={"name": st.one_of(st.just("f"), anything), "arguments": anything, "parameters": anything}
)
call = st.one_of(anything, st.fixed_dictionaries({}, optional={"id": anything, "type": anything, "function": function}))
message = st.one_of(
    anything,
    st.fixed_dictionaries(
        {"role": st.one_of(roles, scalars)},
        optional={
            "content": st.one_of(st.text(max_size=9), st.lists(part, max_size=3), anything),
            "tool_calls": st.one_of(st.lists(call, max_size=2), anything),
            "tool_call_id": anything,
            "name": anything,
            "reasoning_content": anything,
        },
    ),
)
FIELDS = """model n stream stream_options temperature top_p top_k max_completion_tokens stop seed logprobs
top_logprobs tool_choice response_format chat_template_kwargs return_token_ids stop_token_ids presence_penalty system
stop_sequences prompt input instructions previous_response_id store text parallel_tool_calls min_tokens best_of reward
call agent modalities ignore_eos repetition_penalty min_p""".split()  # noqa: SIM905
tool = st.one_of(
    anything,
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["function", "custom", "x"]),
            "function": function,
            "name": anything,
            "input_schema": anything,
        },
    ),
)
bodies = st.one_of(
    anything,
    st.fixed_dictionaries(
        {},
        optional={
            "messages": st.one_of(st.lists(message, max_size=4), anything),
            "tools": st.one_of(st.lists(tool, max_size=3), anything),
            "max_tokens": st.one_of(st.integers(-1, 50), anything),
            **dict.fromkeys(FIELDS, anything),
        },
    ),
)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from([*POST, CHAT]), bodies),
        min_size=20,
        max_size=20,
    )
)
def test_no_body_makes_the_gateway_fail(requests: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        async with place(LineEngine("fine")) as here:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            for path, body in requests:
                writer.write(request_bytes("POST", path, here.key.api_key, body))
                reply = await read_reply(reader)
                assert reply.status < 500 or path == "/v1/embeddings", (path, body, reply)
                if reply.headers.get("connection") == "close":
                    writer.close()
                    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.close()
            assert not here.session.tracker.in_flight

    asyncio.run(run())


STREAMS = {
    CHAT: (b"data: [DONE]", b'data: {"error"'),
    "/v1/completions": (b"data: [DONE]", b'data: {"error"'),
    "/v1/messages": (b"event: message_stop", b"event: error"),
    "/v1/responses": (b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
}
START: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}


def streams_end(here: Any, requests: list[tuple[str, Any]]) -> Any:
    """Send each as a stream: all are refused, or end with an event that says how they ended."""

    async def one(path: str, body: Any) -> None:
        reply = await post(here, path, {**START[path], **(body if isinstance(body, dict) else {}), "stream": True})
        assert reply.status < 500, (path, body, reply)
        if reply.status == 200:
            assert any(end in reply.body for end in STREAMS[path]), (path, body, reply)

    return asyncio.gather(*(one(path, body) for path, body in requests))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(sorted(STREAMS)), bodies), min_size=20, max_size=20))
def test_no_body_leaves_a_stream_without_an_end(requests: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        async with place(LineEngine("fine")) as here:
            await streams_end(here, requests)
            assert not here.session.tracker.in_flight

    asyncio.run(run())


def spoken(**more: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", "content": "x", **more}, *USER]}


def called(arguments: str) -> dict[str, Any]:
    return spoken(tool_calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": [], "content": "x"}]},
        {"messages": [{"role": {}, "content": "x"}]},
        spoken(tool_calls=5),
        spoken(tool_calls={"a": 1}),
        called("[" * 5000),
        called("[" * 900 + "]" * 900),
        called('{"a":' * 900 + "1" + "}" * 900),
        {"messages": [{"role": "user", "content": " " * 500_000}]},
    ],
    ids=["role-list", "role-object", "calls-number", "calls-object", "open", "nested", "objects", "blanks"],
)
def test_malformed_messages_end_their_stream(body: dict[str, Any]) -> None:
    async def run() -> None:
        async with place(LineEngine("fine")) as here:
            await streams_end(here, [(CHAT, body)])
            assert (await post(here, CHAT, BODY)).status == 200

    asyncio.run(run())


def test_a_defect_of_ours_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with place(LineEngine("fine")) as here:

            class Panic(BaseException):
                """As a tokenizer written in Rust raises it: no Exception."""

            for fault in (ZeroDivisionError(), Panic()):
                monkeypatch.setattr(here.session.tracker, "commit", raising(fault))
                reply = await post(here, CHAT, {**BODY, "stream": True})
                assert b'"internal_error"' in reply.body and b"[DONE]" not in reply.body

    def raising(fault: BaseException) -> Any:
        def commit(*_: object, **__: object) -> None:
            raise fault

        return commit

    asyncio.run(run())


# ---------------------------------------------------------------- sizes


def test_what_cannot_fit_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        async with place(tracking=TrackerSettings(max_model_len=1000, checks=())) as here:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
                head = request_bytes("POST", path, here.key.api_key).replace(b"length: 0", b"length: 13000000")
                reply = await send(here.port, head)
                assert reply.status == 400 and "maximum context length" in str(reply.json()), path
            chunked = (
                f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {here.key.api_key}\r\n"
                "transfer-encoding: chunked\r\n\r\n"
                f"30000\r\n{'x' * 0x30000}\r\n"
            )
            assert (await send(here.port, chunked.encode())).status == 413
            assert here.session.tracker.calls == [] and here.session.tracker.context_overflow

    asyncio.run(run())


def test_refused_requests_leave_nothing_behind() -> None:
    async def run() -> None:
        async with place(tracking=TrackerSettings(max_model_len=1000, checks=())) as here:
            tool = {"type": "function", "function": {"name": "f", "description": "word " * 5000, "parameters": {}}}
            words = [{"role": "user", "content": "word " * 1500}]
            bad = [*USER, {"role": "user", "content": 5}]
            tracker = here.session.tracker
            before = tracker.new_bytes("main", words, [tool])
            for body in ({"messages": words, "tools": [tool]}, {"messages": words}, {"messages": bad, "tools": [tool]}):
                assert (await post(here, CHAT, {"model": "m", **body})).status == 400
            assert tracker.new_bytes("main", words, [tool]) == before
            assert tracker.new_bytes("main", bad, []) > 60
            many = [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}] * 4
            assert (await post(here, CHAT, {"messages": many})).status == 400
            kwargs = {"messages": USER, "chat_template_kwargs": {"x": "y" * 20_000}}
            assert (await post(here, CHAT, kwargs)).status == 400
            assert (await post(here, CHAT, BODY)).status == 200

    asyncio.run(run())


def test_others_are_served_while_a_long_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with place() as here:
            renderer = here.session.tracker.renderer
            rendering, go_on, length = threading.Event(), threading.Event(), renderer.length

            def slow(*arguments: Any) -> int:
                rendering.set()
                assert go_on.wait(30)
                return length(*arguments)

            monkeypatch.setattr(renderer, "length", slow)
            words = {"messages": [{"role": "user", "content": "word " * 4000}]}
            slow_call = asyncio.ensure_future(post(here, CHAT, words))
            await until(rendering.is_set)
            assert (await post(here, CHAT, BODY)).status == 200 and not slow_call.done()
            go_on.set()
            assert (await slow_call).status == 200
            assert len(here.session.tracker.calls) == 2

    asyncio.run(run())


# ---------------------------------------------------------------- schemas


def test_schemas_that_take_for_ever_hold_up_nobody() -> None:
    async def run() -> None:
        schema = {"type": "string", "pattern": "^(a+)+$"}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        async with place(LineEngine(json.dumps("a" * 40 + "!"))) as here:
            reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
            writer.write(request_bytes("POST", CHAT, here.key.api_key, {**BODY, "response_format": wanted}))
            slow = asyncio.ensure_future(read_reply(reader))
            assert (await post(here, CHAT, BODY)).status == 200 and not slow.done()
            assert "takes" in (await asyncio.wait_for(slow, 120)).json()["choices"][0]["malformed"][0]
            writer.close()

    asyncio.run(run())


def test_many_small_parts_of_a_request_are_read_in_linear_time() -> None:
    many = range(20_000)
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in many]
    named = [{"name": "f1"} for _ in many]
    parts = [{"type": "text", "text": "word " * 20} for _ in many]
    items = [{"id": "msg_e-0_1", "role": "assistant", "content": "word " * 20} for _ in many]
    thoughts = [{"id": "rs_e-0_1", "type": "reasoning", "content": [{"text": "word " * 20}]} for _ in many]
    started = time.process_time()
    assert read_tool_choice({"type": "allowed_tools", "tools": named}, tools).allowed == ("f1",) * len(many)
    (message,) = read_input([*items, *thoughts], lambda item: None)
    assert message["content"] == message["reasoning_content"] == "word " * 20 * len(many)
    (message,) = anthropic_messages._messages([{"role": "user", "content": parts}])
    assert message["content"] == "word " * 20 * len(many)
    assert time.process_time() - started < 4


def test_what_is_kept_of_an_episode_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_session, "MAX_EPISODE_BYTES", 100_000)
    stop = {**BODY, "stop": ["x" * 30_000] * 2}
    stop_ids = {**BODY, "stop_token_ids": [*range(2_000)]}
    prompts = {"prompt": [[1] * 15_000]}

    async def run() -> None:
        for path, body in ((CHAT, stop), (CHAT, stop_ids), ("/v1/completions", prompts)):
            async with place() as here:
                assert (await post(here, path, body)).status == 200, path
                reply = await post(here, path, body, x_ajet_agent="another")
                assert reply.status == 400 and "this episode's requests hold more" in str(reply.json())
                assert (await post(here, CHAT, BODY)).status == 200

    asyncio.run(run())


def test_a_small_request_does_not_become_a_huge_one() -> None:
    functions = [{"type": "function", "name": "f"}] * 3_000
    with pytest.raises(BadField, match=r"tools\[0\].name has at most 200 characters"):
        read_tools([{"type": "namespace", "name": "x" * 300_000, "tools": functions}])
    with pytest.raises(BadField, match="model has at most 4096 characters"):  # each chunk of a stream repeats it
        read_model({"model": "m" * 300_000}, Caller(None, "a"))  # type: ignore[arg-type] # has no session
    item = {"id": "msg_e-0_0", "role": "assistant", "content": "word " * 10_000}
    with pytest.raises(BadField, match=r"input\[1\] refers twice to an item"):
        read_input([{"type": "item_reference", "id": "msg_e-0_0"}] * 10_000, lambda item_id: item)
