"""The gateway with real clients over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anthropic
import openai
import pytest

from ajet.gateway import Gateway
from ajet.gateway.chat import EpisodeSession
from ajet.schema.errors import RewardError
from ajet.task_runner.tuner import AjetTuner
from support.session_parts import CALL, CONFIG, TOOLS, USER, LineEngine, count, new_session


def in_workflow(engine: LineEngine, workflow: Callable[[AjetTuner, AjetTuner], Awaitable[None]]) -> EpisodeSession:
    """Run a workflow with a tuner of its own process and one as another process would have it."""

    async def run() -> EpisodeSession:
        session = new_session(engine)
        gateway = Gateway()
        await gateway.start()
        key = gateway.register(session)
        near = AjetTuner(session, CONFIG, asyncio.get_running_loop(), gateway)
        far = AjetTuner.remote(key.base_url, key.api_key, CONFIG, control_key=key.control_key)
        await asyncio.to_thread(lambda: asyncio.run(workflow(near, far)))
        await gateway.aclose()
        return session

    return asyncio.run(run())


def test_openai_over_http() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        for tuner in (near, far):
            base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            whole = await client.chat.completions.create(model=model, messages=USER, tools=TOOLS)
            assert whole.choices[0].message.tool_calls[0].function.name == "f"
            stream = await client.chat.completions.create(model=model, messages=USER, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == CALL
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(model="ajet/other", messages=USER)

    session = in_workflow(LineEngine(CALL), workflow)
    assert [call.agent for call in session.tracker.calls] == ["solver"] * 4


def test_every_face_works_in_both_processes() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        for tuner in (near, far):
            client = tuner.as_raw_openai_sdk_client("openai")
            assert (await client.chat.completions.create(messages=USER)).choices[0].message.content == "hi"
            claude: anthropic.AsyncAnthropic = tuner.as_anthropic_client("anthropic")
            reply = await claude.messages.create(model="any", max_tokens=9, messages=USER)
            assert reply.content[0].text == "hi" and reply.stop_reason == "end_turn"
            model = tuner.as_langchain_model("langchain")
            assert (await model.ainvoke("hello")).content == "hi"
            assert model.invoke("hello").content == "hi"

    session = in_workflow(LineEngine("hi"), workflow)
    assert [call.agent for call in session.tracker.calls] == ["openai", "anthropic", "langchain", "langchain"] * 2


def test_anthropic_streams_tool_calls() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        for tuner in (near, far):
            client: anthropic.AsyncAnthropic = tuner.as_anthropic_client()
            async with client.messages.stream(model="m", max_tokens=500, messages=USER, tools=tools) as stream:
                message = await stream.get_final_message()
            thought, text, call = message.content
            assert (thought.thinking, text.text, call.input) == ("hm", "ok", {"a": 1})
            assert message.stop_reason == "tool_use"

    in_workflow(LineEngine(f"<think>\nhm\n</think>\n\nok\n{CALL}"), workflow)


def test_anthropic_streams_an_empty_reply_to_its_end() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        for tuner in (near, far):
            client: anthropic.AsyncAnthropic = tuner.as_anthropic_client()
            async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
                message = await stream.get_final_message()
            assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", count(""))

    in_workflow(LineEngine(""), workflow)


def test_anthropic_counts_a_prompt_without_recording_it() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        client: anthropic.AsyncAnthropic = far.as_anthropic_client()
        counted = await client.messages.count_tokens(model="m", messages=USER, system="Be brief.")
        reply = await client.messages.create(model="m", max_tokens=9, messages=USER, system="Be brief.")
        assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens > 0

    session = in_workflow(LineEngine("hi"), workflow)
    assert len(session.tracker.calls) == 1


def test_rewards_from_another_process() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        client = far.as_raw_openai_sdk_client("a")
        answer = await client.chat.completions.create(messages=USER)
        far.reward(0.5, call=answer.id, replace=True)
        far.reward(1.0)
        with pytest.raises(RewardError):
            far.reward(1.0, agent=3)  # type: ignore[arg-type]
        for tuner in (near, far):  # a stream that was left before it told its id
            for nobody in ({"call": ""}, {"agent": ""}):
                with pytest.raises(RewardError, match="no such"):
                    tuner.reward(9.0, **nobody)
        with pytest.raises(RewardError, match="needs a call"):
            far.reward(1.0, replace=True)

    session = in_workflow(LineEngine("hi"), workflow)
    episode = session.tracker.finish(None)
    (call,) = episode.tree.calls
    assert episode.reward == 1.0 and call.reward == 0.5 and call.replaces_outcome


def test_completions_extend_what_they_begin_with() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        for tuner in (near, far):
            client: openai.AsyncOpenAI = tuner.as_raw_openai_sdk_client("tokens")
            ask = client.completions.create
            first = await ask(model="m", prompt="Once upon", logprobs=2, extra_body={"return_token_ids": True})
            choice = first.choices[0]
            assert choice.text == "a time" and len(choice.logprobs.tokens) == len(choice.token_ids) == count("a time")
            longer = [*choice.prompt_token_ids, *choice.token_ids, 5, 6]
            again = await ask(model="m", prompt=longer, n=2)
            assert [one.text for one in again.choices] == ["a time"] * 2
            stream = await ask(model="m", prompt=["Once"], stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "a time"
            assert chunks[-1].usage.completion_tokens == count("a time")
            for prompt in ([], [10**9], [1.5], [-1], 3):
                with pytest.raises(openai.BadRequestError):
                    await ask(model="m", prompt=prompt)

    session = in_workflow(LineEngine("a time"), workflow)
    assert [call.turn for call in session.tracker.calls] == [0, 1, 1, 0] * 2
    tree = session.tracker.finish(1.0).tree
    assert [call.extends for call in tree.calls][:4] == [-1, 0, 0, -1]


def test_response_format_is_asked_for_and_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        client: openai.AsyncOpenAI = near.as_raw_openai_sdk_client()
        malformed = []
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=USER, response_format=wanted)
            malformed.append(getattr(reply.choices[0], "malformed", []))
        assert malformed[0] == [] and "required" in malformed[1][0] and "not JSON" in malformed[2][0]
        for bad in (
            {"type": "x"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
        ):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=USER, response_format=bad)
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\] must be an object"):
            await client.chat.completions.create(model="m", messages=["x"], response_format=wanted)

    session = in_workflow(LineEngine('{"a": 1}', "{}", "no"), workflow)
    assert "JSON schema" in session.tracker.calls[0].new_messages[0]["content"]


def test_response_format_is_asked_for_in_the_one_system_message_whatever_its_form() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        client: openai.AsyncOpenAI = near.as_raw_openai_sdk_client()
        for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
            messages: list[object] = [{"role": "system", "content": content}, *USER]
            await client.chat.completions.create(model="m", messages=messages, response_format={"type": "json_object"})

    session = in_workflow(LineEngine("{}"), workflow)
    prompts = [[message["content"] for message in call.new_messages] for call in session.tracker.calls]
    assert prompts[0] == prompts[1] == ["Be brief.\n\nAnswer with JSON only.", "hello"]


def test_a_tool_that_had_to_be_called_and_was_not_is_named() -> None:
    async def workflow(near: AjetTuner, far: AjetTuner) -> None:
        ask = near.as_raw_openai_sdk_client().chat.completions.create
        function = {"type": "function", "function": {"name": "f"}}
        for choice in ("required", function):
            reply = await ask(messages=USER, tools=TOOLS, tool_choice=choice)
            assert "tool_choice" in reply.choices[0].malformed[0]
        for tools, choice in ((None, "required"), (TOOLS, {"type": "function", "function": {"name": "g"}})):
            with pytest.raises(openai.BadRequestError):
                await ask(messages=USER, tools=tools or [], tool_choice=choice)

    in_workflow(LineEngine("no"), workflow)
