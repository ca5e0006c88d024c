"""`/v1/responses` through OpenAI's own client over HTTP: the same tokens as the chat protocol, whole and streamed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pydantic
import pytest

from ajet.gateway import Gateway
from ajet.gateway.chat import EpisodeSession
from ajet.gateway.chat.session_log import StoredResponses
from ajet.gateway.chat.tool_call_parsers import FAMILIES
from ajet.gateway.gateway import answer
from ajet.gateway.protocol import Caller, agent_key
from ajet.schema.chat import Completion, GenerateRequest
from ajet.schema.episode import Call
from ajet.schema.errors import EngineError
from support.gateway_parts import place, post
from support.session_parts import CALL, LineEngine, count, new_session, renderer, replied, tokenizer

THOUGHT = f"<think>\nhm\n</think>\n\nok\n{CALL}"
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}]
TOOLS: Any = [{"type": "function", "name": "f", "description": "F", "parameters": {"type": "object"}}]
ASK: Any = [{"role": "user", "content": "hello"}]

Talk = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def talk(talk: Talk, *lines: str | BaseException) -> EpisodeSession:
    """Let a client talk to a model that says these lines."""

    async def run() -> EpisodeSession:
        session = new_session(LineEngine(*lines))
        gateway = Gateway()
        await gateway.start()
        key = gateway.register(session)
        async with openai.AsyncOpenAI(base_url=key.base_url, api_key=key.api_key, max_retries=0) as client:
            await talk(client)
        await gateway.aclose()
        return session

    return asyncio.run(run())


def as_recorded(call: Call) -> dict[str, Any]:
    """A call without the time it took."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    fields |= {"started_s": 0, "seconds": 0, "logprobs": call.logprobs.tolist(), "mask": call.mask.tolist()}
    return fields


async def tool_loop(client: openai.AsyncOpenAI, ask: Callable[..., Awaitable[Any]], turns: int = 3) -> None:
    """An agent that sends the whole conversation each time."""
    items = list(ASK)
    for turn in range(turns):
        response = await ask(client, model="m", instructions="Be brief.", input=items, tools=TOOLS)
        reasoning, message, call = response.output
        assert (reasoning.content[0].text, message.content[0].text, call.arguments) == ("hm", "ok", '{"a": 1}')
        assert response.output_text == "ok" and response.status == "completed"
        assert response.usage.output_tokens_details.reasoning_tokens == len(tokenizer().encode("hm"))
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"}]


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    return await client.responses.create(**asked)


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    async with client.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text
    return response


async def stored(client: openai.AsyncOpenAI, ask: Callable[..., Awaitable[Any]]) -> None:
    """An agent that sends what is new, and the id of the response before."""
    items, before = list(ASK), None
    for turn in range(3):
        response = await ask(
            client,
            model="m",
            instructions="Be brief.",
            input=items,
            tools=TOOLS,
            **({"previous_response_id": before} if before else {}),
        )
        before = response.id
        call = response.output[-1]
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"}]


async def by_chat(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *ASK]
    for turn in range(3):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        message = reply.choices[0].message
        assert message.tool_calls
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"result {turn}"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_thinks_again_is_sent_back_as_one(stream: bool) -> None:
    line = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>At f.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    )

    async def run() -> None:
        session = new_session(LineEngine(line), parser=FAMILIES["harmony"])
        items: list[Any] = [*ASK]
        for extends in (-1, 0):
            body = {"input": items, "tools": TOOLS, "stream": stream}
            reply = await answer("POST", "/v1/responses", json.dumps(body).encode(), Caller(session))
            said = reply.body if isinstance(reply.body, bytes) else b"".join([chunk async for chunk in reply.body])
            output = json.loads(said.split(b"data: ")[-1])
            output = output["response"]["output"] if stream else output["output"]
            assert len(output) == (4 if stream else 3)
            items += [*output, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "r"}]
            assert session.tracker.calls[-1].extends == extends

    asyncio.run(run())


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("agent", [tool_loop, stored])
def test_a_tool_loop_has_the_tokens_of_the_chat_protocol(agent: Any, ask: Any) -> None:
    session = talk(lambda client: agent(client, ask), THOUGHT)
    chat = talk(by_chat, THOUGHT)
    ours, theirs = (one.tracker.finish(None).tree for one in (session, chat))
    assert [call.extends for call in ours.calls] == [-1, 0, 1]
    assert [(run.ids.tolist(), run.parent, run.start, run.call) for run in ours.runs] == [
        (run.ids.tolist(), run.parent, run.start, run.call) for run in theirs.runs
    ]
    assert [as_recorded(call) for call in ours.calls] == [as_recorded(call) for call in theirs.calls]
    assert ours.toolsets == theirs.toolsets


def test_items_come_back_in_any_of_the_forms_clients_send() -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input="hello", tools=TOOLS)
        reasoning, message, call = (item.model_dump(exclude_none=True) for item in first.output)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        parts = {**result, "output": [{"type": "input_text", "text": "done"}]}
        bare = [
            {"role": "assistant", "content": "ok"},
            {key: call[key] for key in ("type", "call_id", "name", "arguments")},
        ]
        hidden = {"type": "reasoning", "id": reasoning["id"], "summary": [], "encrypted_content": "x"}
        references = [{"type": "item_reference", "id": item["id"]} for item in (reasoning, message, call)]
        ask: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        for reply in (
            [reasoning, message, call],
            [hidden, message, call],
            bare,
            bare[::-1],
            references,
        ):
            for output in (result, parts):
                await client.responses.create(model="m", input=[*ask, *reply, output], tools=TOOLS)

    session = talk(run, THOUGHT)
    assert {call.extends for call in session.tracker.finish(None).tree.calls} == {-1, 0}


def test_streamed_items_are_opened_filled_and_closed() -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        stream = await client.responses.create(model="m", input="hello", tools=TOOLS, stream=True)
        kinds = [event.type.removeprefix("response.") async for event in stream]
        squeezed = [kind for index, kind in enumerate(kinds) if kinds[index - 1] != kind or not kind.endswith("delta")]
        item = ["output_item.added", "content_part.added"]
        end = ["content_part.done", "output_item.done"]
        assert squeezed == [
            *("created", "in_progress"),
            *(*item, "reasoning_text.delta", "reasoning_text.done", *end),
            *(*item, "output_text.delta", "output_text.done", *end),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]

    talk(run, THOUGHT)


@pytest.mark.parametrize("line", ["", "hi", "<think>\nhm\n</think>\n\n", "<think>\nhm", f"{CALL}\nafter", THOUGHT])
def test_a_stream_ends_with_the_response_it_showed(line: str) -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        whole_one = await whole(client, model="m", input="hello", tools=TOOLS)
        shown = await streamed(client, model="m", input="hello", tools=TOOLS)
        assert shown.output_text == whole_one.output_text
        assert shown.usage == whole_one.usage and shown.usage.output_tokens == count(line)
        kinds = [item.type for item in shown.output]
        assert sorted(kinds) == sorted(item.type for item in whole_one.output)

    talk(run, line)


def test_a_reply_cut_short_is_incomplete() -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(model="m", input="hello", max_output_tokens=1)
        assert response.status == "incomplete" and response.incomplete_details
        assert response.incomplete_details.reason == "max_output_tokens"
        stream = await client.responses.create(model="m", input="hello", max_output_tokens=1, stream=True)
        last = [event async for event in stream][-1]
        assert (last.type == "response.incomplete" and last.response.output == response.output) or last.response.output

    talk(run, "a long reply")


def test_structured_text_is_asked_for_as_in_chat() -> None:
    class Answer(pydantic.BaseModel):
        a: int

    async def run(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.parse(model="m", input="hello", text_format=Answer)
        assert response.output_parsed == Answer(a=1)
        chat = await client.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
        assert chat.choices[0].message.parsed == Answer(a=1)
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.type"):
            await client.responses.create(model="m", input="hello", text={"format": {"type": "x"}})  # type: ignore

    session = talk(run, '{"a": 1}')
    first, second = session.tracker.calls
    assert first.new_messages == second.new_messages and "JSON schema" in first.new_messages[0]["content"]


def test_instructions_are_not_carried_over() -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input="one", instructions="Be brief.")
        await client.responses.create(model="m", input="two", previous_response_id=first.id)
        unstored = await client.responses.create(model="m", input="one", store=False)
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model="m", input="two", previous_response_id=unstored.id)
        assert error.value.param == "previous_response_id"

    session = talk(run, "hi")
    roles = [message["role"] for message in session.tracker.calls[1].new_messages]
    assert roles == ["user", "assistant", "user"]


def test_an_agent_continues_only_its_own_responses() -> None:
    async def run() -> None:
        async with place() as here:
            first = (await post(here, "/v1/responses", {"model": "ajet-solver", "input": "x"})).json()
            mine, item = first["id"], [{"type": "item_reference", "id": first["output"][0]["id"]}]
            for agent, status in (("solver", 200), ("critic", 400)):
                key = agent_key(here.key.api_key, agent, "t")
                body = {"input": "y", "previous_response_id": mine}
                assert (await post(here, "/v1/responses", body, key)).status == status
                assert (await post(here, "/v1/responses", {"input": item}, key)).status == status
            control = here.key.control_key
            assert (await post(here, "/v1/rewards", {"reward": 1, "call": mine}, control)).status == 200
            assert (await post(here, "/v1/responses", {"input": "y", "previous_response_id": mine})).status == 200

    asyncio.run(run())


def test_an_engine_that_fails_at_once_is_an_error() -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError):
            await client.responses.create(model="m", input="hello", stream=True)

    talk(run, EngineError("broken"))


class BreakingEngine(LineEngine):
    """Says its line and then fails."""

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        await super().generate(request, on_tokens)
        raise EngineError("broken")


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_a_failed_response() -> None:
    async def run() -> None:
        async with place(BreakingEngine("a long reply")) as here:
            reply = await post(here, "/v1/responses", {"input": "x", "stream": True})
            lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
            last = json.loads(lines[-1])
            assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
            assert "broken" in last["response"]["error"]["message"]
            assert here.session.responses.get(last["response"]["id"]) is None

    asyncio.run(run())


MALFORMED: list[tuple[str, Any]] = [
    ("input", None),
    ("input", []),
    ("input", 3),
    ("input[0]", [3]),
    ("input[0].role", [{"role": "x", "content": "y"}]),
    ("input[0].role", [{}]),
    ("input[0].content", [{"role": "user", "content": 3}]),
    ("input[0].type", [{"type": "image_generation_call"}]),
    ("input[0].type", [{"type": ["message"]}]),
    ("input[0].id", [{"type": "item_reference", "id": "msg_9"}]),
    ("input[0].id", [{"type": "item_reference"}]),
    ("input[0].call_id", [{"type": "function_call_output", "output": "x"}]),
    ("input[0].output", [{"type": "function_call_output", "call_id": "x", "output": None}]),
    ("input[0].arguments", [{"type": "function_call", "call_id": "x", "name": "f", "arguments": {}}]),
    ("input[0].content", [{"type": "reasoning", "content": "x"}]),
    ("input[0].content", [{"type": "reasoning", "content": [{"text": 3}]}]),
]
REFUSED: list[tuple[str, Any]] = [
    ("background", True),
    ("conversation", "c"),
    ("prompt", {"id": "p"}),
    ("max_tool_calls", 3),
    ("truncation", "auto"),
    ("top_logprobs", 21),
    ("include", ["file_search_call.results"]),
    ("tools[0].type", [{"type": "file_search"}]),
    ("tools[0].type", [{"type": "local_shell"}]),
    ("tools[0].name", [{"type": "custom"}]),
    ("tools[0].format", [{"type": "custom", "name": "x", "format": 3}]),
    ("tools[0].tools", [{"type": "namespace", "name": "x"}]),
    ("tools[0].tools[0].type", [{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]),
    ("tools[0].name", [{"type": "function"}]),
    ("tool_choice", {"type": "web_search_preview"}),
    ("tool_choice", {"type": "function", "name": "g"}),
    ("tool_choice", "required"),
    ("logit_bias", {"1": 2}),
    ("instructions", 3),
    ("text.format.type", {"format": {"type": "grammar"}}),
    ("max_output_tokens", 0),
    ("something_new", "x"),
]


def test_what_is_not_supported_is_refused_by_name() -> None:
    async def run() -> None:
        async with place() as here:
            cases = [(param, {"input": value}) for param, value in MALFORMED]
            cases += [(param, {"input": "x", param.partition("[")[0].partition(".")[0]: v}) for param, v in REFUSED]
            for param, body in cases:
                reply = await post(here, "/v1/responses", body)
                assert (reply.status, reply.json()["error"]["param"]) == (400, param), (body, reply.body)
            images = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
            reply = await post(here, "/v1/responses", images)
            assert reply.status == 400 and "input[0].content[0]" in reply.json()["error"]["message"]
            assert here.session.tracker.calls == []
            harmless = {
                "metadata": {"a": "b"},
                "reasoning": {"effort": "low", "summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "k",
                "stream_options": {"include_obfuscation": False},
                "text": {"verbosity": "low"},
                "service_tier": "auto",
            }
            assert (await post(here, "/v1/responses", {"input": "x", **harmless})).status == 200
            assert len(replied(here.session)) == 1

    asyncio.run(run())


def test_what_is_stored_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.gateway.chat.session_log.MAX_RESPONSES", 3)
    monkeypatch.setattr("ajet.gateway.chat.session_log.MAX_RESPONSE_BYTES", 1000)
    store = StoredResponses()
    for number in range(5):
        store.put(f"r{number}", "a", [], [{"role": "user", "content": "x"}], [{"id": f"i{number}"}])
    assert [store.get(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert store.item("i1") is None and store.item("i4") == {"id": "i4"}
    store.put("large", "a", [], [{"role": "user", "content": "x" * 2000}], [])
    assert store.get("r4") is None and store.get("large") is not None
    store.put("small", "a", [], [], [])
    assert store.get("large") is None and store.get("small") is not None


def test_the_tokens_are_there_for_those_who_ask() -> None:
    async def run() -> None:
        async with place(LineEngine("hi")) as here:
            reply = (await post(here, "/v1/responses", {"input": "x", "return_token_ids": True})).json()
            (call,) = here.session.tracker.finish(None).tree.calls
            assert len(reply["token_ids"]) == count("hi") == reply["usage"]["output_tokens"]
            assert len(reply["prompt_token_ids"]) == reply["usage"]["input_tokens"]
            assert json.dumps(call.reply)

    asyncio.run(run())


CODEX_TOOLS: list[Any] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "x",
        "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client"},
]
PATCH = '*** Begin Patch\n"é"\n*** End Patch\n'


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_custom_tools_and_namespaces(stream: bool) -> None:
    """What Codex sends: free text as a custom tool's input, functions in a namespace, hosted tools."""
    calls = [{"name": "apply_patch", "arguments": {"input": PATCH}}, {"name": "agents.close", "arguments": {"a": 1}}]
    text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    async def run() -> None:
        async with place(LineEngine(text, "done")) as here:
            client = openai.AsyncOpenAI(base_url=here.key.base_url, api_key=here.key.api_key)
            given: list[Any] = [{"role": "user", "content": "go"}]
            if stream:
                kinds = []
                async for event in await client.responses.create(
                    model="m", input=given, tools=CODEX_TOOLS, stream=True
                ):
                    kinds.append(event.type)
                    if event.type == "response.custom_tool_call_input.done":
                        assert event.input == PATCH
                reply = event.response
                assert kinds.count("response.function_call_arguments.delta") > 1
                assert "response.custom_tool_call_input.delta" in kinds
            else:
                reply = await client.responses.create(model="m", input=given, tools=CODEX_TOOLS)
            patch, close = reply.output
            assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
            assert (close.type, close.name, json.loads(close.arguments)) == ("function_call", "close", {"a": 1})
            assert close.namespace == "agents"
            given += [item.model_dump(exclude_none=True) for item in reply.output]
            given.append({"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done"})
            given.append({"type": "function_call_output", "call_id": close.call_id, "output": "{}"})
            last = await client.responses.create(model="m", input=given, tools=CODEX_TOOLS)
            assert last.output_text == "done"
            _, second = here.session.tracker.calls
            assert second.fork is None
            prompt = here.session.tokenizer.decode(here.engine.requests[0].prompt_ids)
            assert "start: LINE" in prompt and "agents.close" in prompt and "web_search" not in prompt

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_log_probabilities_of_the_text(stream: bool) -> None:
    async def run() -> None:
        async with place(LineEngine(f"<think>Hm.</think>Héllo you.\n{CALL}")) as here:
            body = {"input": "x", "tools": TOOLS, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
            reply = await post(here, "/v1/responses", {**body, "stream": stream})
            if stream:
                assert reply.body.count(b'"logprobs":[]') > 2, "those of the deltas come with the whole response"
                last = reply.body.decode().strip().rpartition("data: ")[2]
                response = json.loads(last)["response"]
            else:
                response = reply.json()
            (text,) = [item for item in response["output"] if item["type"] == "message"]
            (part,) = text["content"]
            ids = renderer().tokenizer.encode("Héllo you.", add_special_tokens=False)
            assert part["text"] == "Héllo you." and 0 <= len(part["logprobs"]) - len(ids) <= 2
            said = "".join(token["token"] for token in part["logprobs"])
            assert "llo you." in said and "Hm" not in said and "tool_call" not in said
            assert all(token["logprob"] == -0.5 for token in part["logprobs"])

    asyncio.run(run())


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


UNREADABLE = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": ]}}\n</tool_call>'


@pytest.mark.parametrize("line", [f"ok\n{UNREADABLE}", UNREADABLE[:50]], ids=["unreadable", "cut_off"])
def test_a_call_that_proves_unreadable_ends_with_an_error_in_every_protocol(line: str) -> None:
    async def run() -> None:
        async with place(LineEngine(line)) as here:
            items = events_of((await post(here, "/v1/responses", {"input": "x", "tools": TOOLS, "stream": True})).body)
            chat = {"messages": ASK, "tools": CHAT_TOOLS, "stream": True}
            chunks = events_of((await post(here, "/v1/chat/completions", chat)).body)
            tools = [{"name": "f", "description": "F", "input_schema": {"type": "object"}}]
            body = {"messages": ASK, "max_tokens": 99, "tools": tools, "stream": True}
            blocks = events_of((await post(here, "/v1/messages", body)).body)

        ended = [event["item"] for event in items if event["type"] == "response.output_item.done"]
        (call,) = [item for item in ended if item["type"] == "function_call"]
        assert call["status"] == "incomplete" and call["error"]["type"] == "unreadable_tool_call"
        assert items[-1]["type"] == "response.completed" and items[-1]["response"]["malformed"]
        assert "function_call" not in [item["type"] for item in items[-1]["response"]["output"]]

        pieces = [
            piece for chunk in chunks for choice in chunk["choices"] for piece in choice["delta"].get("tool_calls", [])
        ]
        assert pieces[0]["function"]["name"] == "f" and pieces[-1]["error"] == call["error"]
        assert chunks[-1]["choices"][0]["malformed"]

        begun = {event["index"] for event in blocks if event["type"] == "content_block_start"}
        stops = [event for event in blocks if event["type"] == "content_block_stop"]
        assert {event["index"] for event in stops} == begun
        assert [event["error"] for event in stops if "error" in event] == [call["error"]]
        assert blocks[-1]["type"] == "message_stop"

    asyncio.run(run())


@pytest.mark.parametrize("ask", [whole, streamed])
def test_the_client_reads_past_a_call_that_proves_unreadable(ask: Callable[..., Awaitable[Any]]) -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        response = await ask(client, model="m", input="hello", tools=TOOLS)
        assert UNREADABLE in response.output_text

    talk(run, f"ok\n{UNREADABLE}")
