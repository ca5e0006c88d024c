"""What a request may ask for: honoured, or refused by a name that the client can find."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from ajet.context_tracker import TrackerSettings
from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.gateway.chat.episode_session import LEAST_REQUEST_NODES
from ajet.gateway.gateway import LARGE
from ajet.gateway.openai_completions import chat_body
from ajet.gateway.protocol import BadField, json_body
from ajet.system.http_messages import MAX_DEPTH
from support.gateway_parts import place, post
from support.session_parts import CALL, TOOLS, USER, LineEngine, count
from support.waiting import until

CHAT = "/v1/chat/completions"
BODY = {"messages": USER}

REFUSED: dict[str, Any] = {
    "min_tokens": 3,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= x",
    "structured_outputs": {"regex": "a"},
    "best_of": 3,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "truncate_prompt_tokens": 10,
    "logit_bias": {"5": -100},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "use_beam_search": True,
    "prompt_logprobs": 1,
    "chat_template": "{{ messages }}",
    "skip_special_tokens": False,
}
NEUTRAL: dict[str, Any] = {
    "min_tokens": 0,
    "bad_words": [],
    "guided_json": None,
    "best_of": 1,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "skip_special_tokens": True,
    "logit_bias": {},
    "length_penalty": 1.0,
    "functions": None,
    "parallel_tool_calls": True,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}),
        ("/v1/messages", {**BODY, "max_tokens": 9, "return_token_ids": 1}),
    ],
)
def test_nothing_is_sampled_for_a_refused_request(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with place() as here:
            assert (await post(here, path, body)).status == 400
            assert here.session.tracker.finish(None).tree.calls == []

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_what_cannot_be_honoured_is_refused_by_name(path: str) -> None:
    async def run() -> None:
        async with place() as here:
            body: dict[str, Any] = {CHAT: BODY, "/v1/completions": {"prompt": "x"}}.get(path, {"input": "x"})
            for key, value in REFUSED.items():
                for stream in (False, True):
                    reply = await post(here, path, {**body, key: value, "stream": stream})
                    assert (reply.status, reply.json()["error"]["param"]) == (400, key), reply.body
            assert here.session.tracker.calls == []
            assert (await post(here, path, {**body, **NEUTRAL})).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("choice", "fits"),
    [
        ("any", True),
        ("auto", True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[0]]}}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, False),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"type": "function", "function": {"name": "g"}}, False),
    ],
)
def test_a_choice_of_tools_is_checked(choice: Any, fits: bool) -> None:
    async def run() -> None:
        async with place(LineEngine(CALL)) as here:
            tools = [*TOOLS, {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}]
            reply = await post(here, CHAT, {**BODY, "tools": tools, "tool_choice": choice})
            assert reply.status == 200, reply.body
            malformed = reply.json()["choices"][0].get("malformed", [])
            assert [text.partition(":")[0] for text in malformed] == ([] if fits else ["tool_choice"])

    asyncio.run(run())


def test_choices_of_tools_that_mean_nothing_here_are_refused() -> None:
    async def run() -> None:
        async with place() as here:
            for choice in (
                {"type": "custom", "custom": {"name": "x"}},
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
                {"type": "allowed_tools"},
                {"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": []}},
                {"function": 3},
                {},
                [],
                3,
            ):
                reply = await post(here, CHAT, {**BODY, "tools": TOOLS, "tool_choice": choice})
                assert (reply.status, reply.json()["error"]["param"]) == (400, "tool_choice"), choice
            custom = [{"type": "custom", "custom": {"name": "x"}}]
            reply = await post(here, CHAT, {**BODY, "tools": custom})
            assert (reply.status, reply.json()["error"]["param"]) == (400, "tools[0].type")

    asyncio.run(run())


def test_more_calls_at_once_than_were_wanted_are_named() -> None:
    async def run() -> None:
        async with place(LineEngine(f"{CALL}\n{CALL}")) as here:
            for wanted, malformed in ((False, 1), (True, 0), (None, 0)):
                reply = await post(here, CHAT, {**BODY, "tools": TOOLS, "parallel_tool_calls": wanted})
                choice = reply.json()["choices"][0]
                assert len(choice["message"]["tool_calls"]) == 2
                assert len(choice.get("malformed", [])) == malformed
            flat = [{"type": "function", "name": "f"}]
            reply = await post(here, "/v1/responses", {"input": "x", "tools": flat, "parallel_tool_calls": False})
            assert "parallel_tool_calls" in reply.json()["malformed"][0]

    asyncio.run(run())


def test_streamed_completions_end_with_logprobs_and_ids() -> None:
    async def run() -> None:
        async with place(LineEngine("a time")) as here:
            asked = {"prompt": "Once", "logprobs": 1, "return_token_ids": True}
            (whole,) = (await post(here, "/v1/completions", asked)).json()["choices"]
            streamed = await post(here, "/v1/completions", {**asked, "stream": True})
            lines = [line[6:] for line in streamed.body.decode().splitlines() if line.startswith("data: {")]
            last = json.loads(lines[-1])["choices"][0]
            assert len(last["token_ids"]) == count("a time")
            assert {**last, "text": whole["text"], "call_id": ""} == {**whole, "call_id": ""}

    asyncio.run(run())


def test_streamed_chats_end_with_the_likeliest_alternatives_of_every_token() -> None:
    async def run() -> None:
        engine = TorchEngine(ModelSource.resolve("tiny:qwen2"), TorchEngineSettings(max_model_len=256))
        await engine.ready()
        async with place(engine) as here:  # type: ignore[arg-type]
            asked = {**BODY, "logprobs": True, "top_logprobs": 3, "max_tokens": 5}
            streamed = await post(here, CHAT, {**asked, "stream": True, "return_token_ids": True})
            lines = [line[6:] for line in streamed.body.decode().splitlines() if line.startswith("data: {")]
            last = json.loads(lines[-1])["choices"][0]
            tokens = last["logprobs"]["content"]
            assert len(tokens) == len(last["token_ids"]) == 5
            assert [len(token["top_logprobs"]) for token in tokens] == [3] * 5
            for token in tokens:
                ranked = [one["logprob"] for one in token["top_logprobs"]]
                assert ranked == sorted(ranked, reverse=True) and token["logprob"] <= ranked[0] + 1e-6
        await engine.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_without_log_probabilities_are_refused(stream: bool) -> None:
    async def run() -> None:
        async with place() as here:
            for asked in ({"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}, {"top_logprobs": 21}):
                reply = await post(here, CHAT, {**BODY, **asked, "stream": stream})
                assert (reply.status, reply.json()["error"]["param"]) == (400, "top_logprobs"), reply.body
            assert here.session.tracker.calls == []
            assert (await post(here, CHAT, {**BODY, "top_logprobs": 0, "stream": stream})).status == 200

    asyncio.run(run())


# ---------------------------------------------------------------- bodies as JSON


def nested(depth: int) -> bytes:
    return b'{"a": ' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (nested(MAX_DEPTH), ""),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (b'{"a": [' + b"[],{}," * 8000 + b"1]}", ""),
        (b'{"a": [' + b"[]," * LEAST_REQUEST_NODES + b"1]}", "objects and arrays"),
        (json.dumps({"a": "[{" * LEAST_REQUEST_NODES}).encode(), ""),
        (json.dumps({"[" * LEAST_REQUEST_NODES: '"[\\' * 5000}).encode(), ""),
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
        assert json_body(body, LEAST_REQUEST_NODES) == json.loads(body)
        return
    with pytest.raises(BadField, match=says):
        json_body(body, LEAST_REQUEST_NODES)


@pytest.mark.parametrize(("room", "status"), [(18_000, 400), (600_000, 200)])
def test_as_many_tools_as_the_context_has_room_for(room: int, status: int) -> None:
    fields = {name: {"type": "array", "items": {"type": "string", "enum": ["a"]}} for name in "abcdefghijklmnop"}
    tools = [
        {"type": "function", "function": {"name": f"t{i}", "parameters": {"type": "object", "properties": fields}}}
        for i in range(384)
    ]

    async def run() -> None:
        async with place(tracking=TrackerSettings(max_model_len=room, checks=())) as here:
            reply = await post(here, CHAT, {**BODY, "tools": tools})
            assert reply.status == status, reply.body[:500]
            said = reply.body.decode()
            assert status == 200 or "objects and arrays" in said or "maximum context length" in said

    asyncio.run(run())


LONG = {"messages": [{"role": "user", "content": "word " * (LARGE // 4)}]}


def test_a_large_prompt_reaches_the_engine_token_by_token() -> None:
    async def run() -> None:
        async with place() as here:
            assert (await post(here, CHAT, LONG)).status == 200
            wanted = here.session._renderer.render(LONG["messages"])
            assert here.engine.requests[-1].prompt_ids == wanted
            assert (await post(here, "/v1/completions", {"prompt": wanted, "max_tokens": 3})).status == 200
            assert here.engine.requests[-1].prompt_ids == wanted

    asyncio.run(run())


MANY = {"messages": [{"role": "user", "content": "a"}] * 12_000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, MANY),
        ("/v1/messages", {**MANY, "max_tokens": 5}),
        ("/v1/messages/count_tokens", MANY),
        ("/v1/responses", {"input": MANY["messages"]}),
        ("/v1/completions", {"prompt": [1] * 40_000}),
        ("/v1/completions", {"prompt": [[1], [1] * 40_000]}),
    ],
    ids=["chat", "messages", "count_tokens", "responses", "token ids", "lists of token ids"],
)
def test_what_has_no_room_is_refused(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with place(tracking=TrackerSettings(max_model_len=10_000, checks=())) as here:
            reply = await post(here, path, body)
            assert reply.status == 400 and "maximum context length is 10000" in reply.body.decode()
            assert all(len(one.prompt_ids) == 1 for one in here.engine.requests)
            assert here.session.tracker.context_overflow == ("count_tokens" not in path), "counting asks nothing"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": "' + b"x" * LARGE, "not JSON"),
        (b"[" + b"1," * LARGE + b"1]", "must be a JSON object, not array"),
        (b'{"a": ' + b"[" * LARGE, "nested deeper"),
        (b'{"a": [' + b"[" * 99 + b"]" * 99 + b'], "b": "' + b"x" * LARGE + b'"}', "nested deeper"),
        (b'{"a": "' + b"\xff" * LARGE + b'"}', "not JSON"),
    ],
    ids=["cut short", "array", "brackets", "deep", "not UTF-8"],
)
def test_a_large_body_that_cannot_be_read_is_refused_as_a_small_one_is(body: bytes, says: str) -> None:
    async def run() -> None:
        async with place() as here:
            reply = await post(here, CHAT, body)
            assert reply.status == 400 and says in reply.json()["error"]["message"]
            assert (await post(here, CHAT, LONG)).status == 200

    asyncio.run(run())


def test_the_loop_is_free_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reading, go_on = threading.Event(), threading.Event()

        def slowly(body: bytes, most: int) -> dict[str, Any]:
            if len(body) > LARGE:
                reading.set()
                assert go_on.wait(30)
            return chat_body(body, most)

        monkeypatch.setattr("ajet.gateway.gateway.chat_body", slowly)
        async with place() as here:
            large = asyncio.ensure_future(post(here, CHAT, LONG))
            await until(reading.is_set)
            assert (await post(here, CHAT, BODY)).status == 200 and not large.done()
            go_on.set()
            assert (await large).status == 200

    asyncio.run(run())
