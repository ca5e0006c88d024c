"""The tuner's clients are their frameworks' own: what they get is what the session recorded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from ajet.config.root import HelperConfig
from ajet.gateway.chat import EpisodeSession, SessionSettings
from ajet.observe.tracing import emit_reward, find_final_reward
from ajet.observe.tracing.attributes import reward_of
from ajet.observe.tracing.recording import Recording, record_spans
from ajet.schema.errors import ConfigError, EngineOverloadedError, RewardError
from ajet.task_runner.tuner import AjetTuner, HelperModel, connection
from ajet.task_runner.tuner.clients import TunedOpenAI
from support.session_parts import CALL, CONFIG, TOOLS, USER, LineEngine, aborted, count, new_session, replied
from support.waiting import until


def in_workflow(
    engine: LineEngine, workflow: Callable[[AjetTuner], Awaitable[None]], config: Any = None, **settings: Any
) -> EpisodeSession:
    """Run a workflow as an episode does: in its own thread and loop."""

    async def run() -> EpisodeSession:
        session = new_session(engine, SessionSettings(**settings))
        tuner = AjetTuner(session, config or CONFIG, asyncio.get_running_loop())
        await asyncio.to_thread(lambda: asyncio.run(workflow(tuner)))
        return session

    return asyncio.run(run())


def test_a_client_that_another_episode_made_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_shared_is_named", threading.Lock())

    def warnings() -> int:
        return caplog.text.count("an episode uses a client or tuner of another episode")

    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client()
        assert tuner._session is not None
        with Recording(lambda _span: None, tuner._session.episode_id).active(), record_spans():
            await client.chat.completions.create(messages=USER)
        assert warnings() == 0
        for _ in range(2):
            with Recording(lambda _span: None, "another").active():
                await client.chat.completions.create(messages=USER)
        assert warnings() == 1

    in_workflow(LineEngine(CALL), workflow)


def test_it_is_named_once_also_if_others_ask_while_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def warning(text: str) -> None:
        said.append(text)
        if len(said) < 3:
            connection._warn_shared()

    monkeypatch.setattr(connection, "_shared_is_named", threading.Lock())
    monkeypatch.setattr(connection.log, "warning", warning)
    connection._warn_shared()
    assert len(said) == 1


def test_openai_client_whole_and_streamed() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client(agent_name="solver")
        assert isinstance(client, openai.AsyncOpenAI)
        whole = await client.chat.completions.create(messages=USER, tools=TOOLS, n=2, logprobs=True)
        assert whole.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content is None
        assert len(whole.choices[1].logprobs.content) == count(CALL)
        other = client.with_options(timeout=20)
        stream = await other.chat.completions.create(
            model="any", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        assert calls[0].function.name == "f" and chunks[-1].usage.completion_tokens == count(CALL)
        assert [model.id async for model in client.models.list()] == ["ajet-solver"]
        tuner.reward(0.5, call=whole.id, replace=True)
        with pytest.raises(RewardError):
            tuner.reward(float("nan"))

    session = in_workflow(LineEngine(CALL), workflow)
    assert {call.agent for call in session.tracker.calls} == {"solver"}
    assert len(replied(session)) == 3
    episode = session.tracker.finish(1.0)
    assert [call.reward for call in episode.tree.calls] == [0.5, None, None]
    assert [call.replaces_outcome for call in episode.tree.calls] == [True, False, False]


def test_an_emitted_reward_of_a_call_is_trained_as_that_calls(caplog: pytest.LogCaptureFixture) -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client()
        sink = tuner.span_sink()
        recording = Recording(sink.add, "e1")
        with recording.active():
            first = await client.chat.completions.create(messages=USER)
            second = await client.chat.completions.create(messages=USER)
            emit_reward(0.25, call=first.id)
            emit_reward({"right": 0.5, "brief": 1.0}, primary_key="right", call=second.id)
            emit_reward(0.75)
            emit_reward(9.0, call="none")
            with pytest.raises(TypeError, match="id of a response"):
                emit_reward(1.0, call=first)
        assert recording.reward is not None and recording.reward.value == 0.75, "the one that is no call's"
        sink.flush()

    session = in_workflow(LineEngine(CALL), workflow)
    episode = session.tracker.finish(None)
    assert (episode.reward, [call.reward for call in episode.tree.calls]) == (0.75, [0.25, 0.5])
    assert "doesn't count: tuner.reward(call='none')" in caplog.text
    assert [reward_of(span) is None for span in session.spans.spans] == [False, False, False, True]
    assert find_final_reward(session.spans.spans) == 0.75


def test_errors_are_openais_own() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client()
        with pytest.raises(openai.BadRequestError) as overflow:
            await client.chat.completions.create(messages=[{"role": "user", "content": "x " * 200_000}])
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="image_url"):
            parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
            await client.chat.completions.create(messages=[{"role": "user", "content": parts}])
        with pytest.raises(openai.NotFoundError):
            await client.moderations.create(model="m", input="x")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(messages=USER)

    session = in_workflow(LineEngine(RuntimeError("broken")), workflow)
    assert len(session.tracker.calls) == 1, "an engine fault is not retried behind the workflow's back"


class Body(Exception):
    """What a client was about to send."""


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": USER},
        {"messages": USER, "tools": TOOLS, "tool_choice": "auto", "temperature": 0.5, "stop": ["a"], "n": 2},
        {"messages": USER, "stream": False, "max_tokens": None, "response_format": {"type": "json_object"}},
        {"messages": [*USER, ChatCompletionMessage(role="assistant", content="hi")], "model": "m"},
        {"messages": iter(USER), "tools": tuple(TOOLS)},
        {"messages": USER, "temperature": openai.omit, "extra_body": {"top_k": 3}, "extra_headers": {"x": "y"}},
        {"messages": USER, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": USER, "metadata": {1: "not JSON"}},
        {"messages": USER, "top_k": 3},
        {"messages": USER, "response_format": BaseModel},
        {"tools": TOOLS},
    ],
)
def test_requests_are_those_of_the_plain_client(arguments: dict[str, Any]) -> None:
    """The short way through the client sends and refuses the same."""

    async def sent(client: openai.AsyncOpenAI, **more: Any) -> Any:
        messages = {"messages": iter(USER)} if not isinstance(arguments.get("messages", []), list) else {}
        try:
            await client.chat.completions.create(**{**arguments, **messages, **more})  # type: ignore[call-overload]
        except (Body, TypeError) as what:
            return type(what), str(what).replace("_Completions", "AsyncCompletions")
        return None

    async def tell(request: Any) -> None:
        raise Body(json.dumps([str(request.url), json.loads(await request.aread())], sort_keys=True))

    async def both() -> tuple[Any, Any]:
        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [tell]})
        plain = openai.AsyncOpenAI(base_url="http://x/v1", api_key="k", http_client=http, max_retries=0)
        ours = TunedOpenAI(base_url="http://x/v1", api_key="k", http_client=http, max_retries=0)
        ours.default_model = "default"
        return await sent(plain, **({} if "model" in arguments else {"model": "default"})), await sent(ours)

    plain, ours = asyncio.run(both())
    assert ours == plain and ours is not None


def test_messages_without_a_name() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        create = tuner.as_raw_openai_sdk_client().chat.completions.create
        assert (await create(USER)).choices[0].message.content == "hi"
        assert [chunk async for chunk in await create(USER, stream=True)]
        with pytest.raises(TypeError, match="messages once"):
            await create(USER, "ajet-solver")
        with pytest.raises(TypeError, match="messages once"):
            await create(USER, messages=USER)

    assert len(in_workflow(LineEngine("hi"), workflow).tracker.calls) == 2


def test_replies_are_those_of_the_plain_client() -> None:
    """By the short way and by the client's own: equal as objects, and as JSON except for names and times."""

    async def workflow(tuner: AjetTuner) -> None:
        create = tuner.as_raw_openai_sdk_client().chat.completions.create
        wanted: dict[str, Any] = {"messages": USER, "tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 0}
        short, own = await create(**wanted), await create(**wanted, extra_headers={"x-any": "1"})
        assert type(short) is type(own) and type(short.choices[0].message) is type(own.choices[0].message)
        assert without_names(short.model_dump()) == without_names(own.model_dump())
        assert short._request_id == own._request_id

    in_workflow(LineEngine(CALL), workflow)


def without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_names(item) for key, item in value.items() if key not in ("id", "call_id", "created")}
    return [without_names(item) for item in value] if isinstance(value, list) else value


def test_a_busy_engine_is_asked_again_by_the_client() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        reply = await tuner.as_raw_openai_sdk_client().chat.completions.create(messages=USER)
        assert reply.choices[0].message.content == "hi"

    engine = LineEngine(EngineOverloadedError("busy"), "hi")
    in_workflow(engine, workflow)
    assert len(engine.requests) == 2


def test_a_blocking_client_in_a_plain_thread() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        connection = tuner._own_connection("a", "t")
        client = openai.OpenAI(
            base_url=connection.base_url,
            api_key=connection.api_key,
            http_client=connection.blocking_client(openai.DefaultHttpxClient),
        )
        assert client.chat.completions.create(model="m", messages=USER).choices[0].message.content == "hi"
        stream = client.chat.completions.create(model="m", messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hi"

    assert len(replied(in_workflow(LineEngine("hi"), workflow))) == 2


def test_giving_up_on_a_call_cancels_it() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.chat.completions.create(messages=USER), 0.05)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.05, max_retries=0).chat.completions.create(messages=USER)

    async def gate() -> asyncio.Event:
        return asyncio.Event()

    engine = LineEngine("hi", gate=asyncio.run(gate()))
    session = in_workflow(engine, workflow)
    assert engine.cancelled == 2 and len(aborted(session)) == 2


def test_leaving_a_stream_cancels_it() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client()
        stream = await client.chat.completions.create(messages=USER, stream=True)
        async with stream:
            async for _ in stream:
                break
        await until(lambda: engine.cancelled)

    engine = LineEngine("x" * 5000)
    session = in_workflow(engine, workflow)
    assert engine.cancelled == 1 and not replied(session)


def test_agentscope_model() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        from agentscope.agent import Agent
        from agentscope.message import UserMsg

        agent = Agent(name="a", system_prompt="s", model=tuner.as_agentscope_model())
        assert (await agent.reply(UserMsg("user", "17*3?"))).get_text_content() == "51"

    assert len(replied(in_workflow(LineEngine("51"), workflow))) == 1


def test_targets_that_are_not_trained_go_to_their_own_model() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        own = object()
        assert tuner.as_agentscope_model(target_tag="critic", debug_model=own) is own
        assert tuner.as_agentscope_model(target_tag="policy", debug_model=own) is not own
        helper = HelperModel("big", "http://127.0.0.1:1/v1", "key")
        client = tuner.as_raw_openai_sdk_client(target_tag="critic", debug_model=helper)
        assert str(client.base_url) == "http://127.0.0.1:1/v1/" and client.default_model == "big"
        frozen = tuner.as_raw_openai_sdk_client(target_tag="critic")
        await frozen.chat.completions.create(messages=USER)

    session = in_workflow(LineEngine("x"), workflow, trainable_targets=("policy",))
    assert [call.trainable for call in session.tracker.calls] == [False]


def test_a_debug_model_is_refused_where_every_target_is_trained() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        for client in (tuner.as_raw_openai_sdk_client, tuner.as_anthropic_client, tuner.as_oai_baseurl_apikey):
            with pytest.raises(ConfigError, match=r"target 'critic', but the workflow has no") as refused:
                client(target_tag="critic", debug_model=HelperModel("big", "http://127.0.0.1:1/v1", "key"))
            assert "trainable_targets: list[str] = ['solver']" in str(refused.value)  # without its type, a class fails

    in_workflow(LineEngine("x"), workflow)


def test_the_configured_helper_serves_every_target_that_is_not_trained() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        client = tuner.as_raw_openai_sdk_client(target_tag="critic")
        assert (str(client.base_url), client.default_model) == ("http://127.0.0.1:1/v1/", "big")
        assert tuple(tuner.as_oai_baseurl_apikey(target_tag="critic")) == ("http://127.0.0.1:1/v1", "key", "big")
        own = object()
        assert tuner.as_langchain_model(target_tag="critic", debug_model=own) is own
        trained = tuner.as_raw_openai_sdk_client(target_tag="policy")
        await trained.chat.completions.create(messages=USER)

    helper = {"model": "big", "base_url": "http://127.0.0.1:1/v1", "api_key": "key"}
    config = SimpleNamespace(ajet=SimpleNamespace(helper=HelperConfig(**helper)))
    session = in_workflow(LineEngine("x"), workflow, config, trainable_targets=("policy",))
    assert [call.trainable for call in session.tracker.calls] == [True]
