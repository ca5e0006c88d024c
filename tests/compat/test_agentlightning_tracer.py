"""Agent-lightning's tracers: spans of one's own, rewards tied to operations, and the calls of `openai`'s clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

import ajet.compat.agentlightning as agl
from ajet.compat.agentlightning.otel import (
    AGL_ANNOTATION,
    AGL_OPERATION,
    LightningSpanAttributes,
    LinkPydanticModel,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    filter_and_unflatten_attributes,
    flatten_attributes,
    get_tracer_provider,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
    unflatten_attributes,
)
from support.http_server import Server
from support.scripted_helper import helper

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def store_of(kind: str) -> AsyncIterator[agl.LightningStore]:
    if kind == "memory":
        async with agl.InMemoryLightningStore() as store:
            yield store
        return
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    async with agl.LightningStoreClient(server.endpoint, server.key) as store:
        yield store
    await server.stop()


@pytest.fixture
def chat() -> Iterator[Server]:
    with helper(lambda said: (500, {}, {"error": {"message": "broken"}}) if said == "break" else f"{said}!") as server:
        yield server


def client(server: Server, kind: Any = openai.AsyncOpenAI) -> Any:
    return kind(base_url=server.url, api_key="k", max_retries=0)


def ids(started: agl.AttemptedRollout) -> dict[str, str]:
    assert started.attempt is not None
    return {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}


@pytest.mark.parametrize("kind", ["memory", "served"])
async def test_spans_of_ones_own_go_to_the_store_with_their_nesting(kind: str) -> None:
    tracer = agl.OtelTracer()
    async with store_of(kind) as store:
        started = await store.start_rollout({"origin": "here"})
        with tracer.lifespan(store):
            async with tracer.trace_context("mine", store=store, **ids(started)) as tracing:
                with tracing.start_as_current_span("outer"), tracing.start_as_current_span("inner") as inner:
                    inner.set_attribute("size", 3)
                agl.emit_reward(1.0)
        spans = {span.name: span for span in await store.query_spans(started.rollout_id)}
        assert set(spans) == {"outer", "inner", AGL_ANNOTATION}
        assert spans["inner"].parent_id == spans["outer"].span_id
        assert spans["inner"].attributes["size"] == 3
        assert spans[AGL_ANNOTATION].attributes["agentlightning.reward.0.value"] == 1.0
        assert spans["inner"].resource.attributes["agentlightning.rollout_id"] == started.rollout_id  # type: ignore[attr-defined]
        assert len(tracer.get_last_trace()) == 3


async def test_a_reward_is_tied_to_an_operation_by_its_links() -> None:
    tracer, store = agl.OtelTracer(), agl.InMemoryLightningStore()
    started = await store.start_rollout(1)
    with tracer.lifespan(store):
        async with tracer.trace_context(**ids(started)):
            for number in ("a", "b"):
                with agl.operation(conversation=number) as done:
                    done.set_output({"status": "ok"})
            attributes = {**make_link_attributes({"conversation": "b"}), **make_tag_attributes(["good", "late"])}
            agl.emit_reward(0.9, attributes=attributes)
    spans = await store.query_spans(started.rollout_id)
    reward = next(span for span in spans if agl.is_reward_span(span))
    rewards = filter_and_unflatten_attributes(reward.attributes, LightningSpanAttributes.REWARD.value)
    assert rewards == [{"name": "primary", "value": 0.9}]
    assert extract_tags_from_attributes(reward.attributes) == ["good", "late"]
    links = extract_links_from_attributes(reward.attributes)
    assert links == [LinkPydanticModel("conversation", "b")]
    (matched,) = query_linked_spans([span for span in spans if span.name == AGL_OPERATION], links)
    assert matched.attributes["conversation"] == "b"
    assert query_linked_spans(spans, [LinkPydanticModel("span_id", matched.span_id)]) == [matched]


def test_attributes_are_flattened_and_nested_again() -> None:
    nested = {"a": {"b": [{"c": 1}, {"c": 2}], "tags": ["x", "y"]}}
    flattened = flatten_attributes(nested)
    assert flattened == {"a.b.0.c": 1, "a.b.1.c": 2, "a.tags": ["x", "y"]}
    assert unflatten_attributes(flattened) == nested
    assert flatten_attributes([{"c": 1}]) == {"0.c": 1}
    assert unflatten_attributes({"0": "a", "2": "b"}) == {"0": "a", "2": "b"}
    with pytest.raises(ValueError, match="'k' must be a text, not int"):
        make_link_attributes({"k": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'a' has a value of its own"):
        filter_and_unflatten_attributes({"a": 1}, "a")
    assert get_tracer_provider() is not None


async def test_model_calls_are_recorded_outside_of_a_run(chat: Server) -> None:
    tracer, store = agl.AgentOpsTracer(), agl.InMemoryLightningStore()
    started = await store.start_rollout(1)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    with tracer.lifespan(store):
        async with tracer.trace_context("trace-1", **ids(started)):
            async with client(chat) as asynchronous:
                await asynchronous.chat.completions.create(model="m", messages=said)
                with pytest.raises(openai.InternalServerError):
                    broken: Any = [{"role": "user", "content": "break"}]
                    await asynchronous.chat.completions.create(model="m", messages=broken)
            with client(chat, openai.OpenAI) as plain:
                await asyncio.to_thread(plain.chat.completions.create, model="m", messages=said[1:])
        async with client(chat) as asynchronous:  # after the context
            await asynchronous.chat.completions.create(model="m", messages=said)
    spans = await store.query_spans(started.rollout_id)
    assert sorted(span.name for span in spans) == ["openai.chat.completion"] * 3 + ["trace-1.session"]
    first, failed, plain = (span for span in spans if span.name == "openai.chat.completion")
    assert first.attributes["gen_ai.request.model"] == "m" and first.attributes["gen_ai.request.streaming"] is False
    assert first.attributes["gen_ai.prompt.0.content"] == "Be brief."
    assert first.attributes["gen_ai.completion.0.content"] == "hello!"
    assert first.attributes["gen_ai.response.id"] == "1"
    assert (failed.status.status_code, plain.attributes["gen_ai.prompt.0.content"]) == ("ERROR", "hello")
    (session,) = (span for span in spans if span.name == "trace-1.session")
    assert session.attributes["agentops.span.kind"] == "session"


def test_what_an_agent_returns_is_the_reward_of_its_call(chat: Server) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as asked:
            await asked.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
        return 0.5

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, initial_resources={"main": agl.LLM(chat.url, "m", "k")})
    (done,) = trainer.fit(agent, ["hello"])
    (triplet,) = agl.TracerTraceToTriplet()(asyncio.run(store.query_spans(done.rollout_id)))
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "hello"}]
    assert triplet.response["raw_content"] == {"role": "assistant", "content": "hello!"}
    assert triplet.reward == 0.5


@pytest.mark.parametrize("given", [{"rollout_id": "r"}, {"attempt_id": "a"}, {"store": agl.InMemoryLightningStore()}])
async def test_a_context_that_names_half_an_attempt_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rollout_id and attempt_id"):
        async with agl.Tracer().trace_context(**given):
            raise AssertionError


async def test_whatever_a_client_takes_is_recorded_and_reaches_the_server(chat: Server) -> None:
    """Messages that are the client's own objects, or can be read only once, and replies as LangChain asks for them."""

    tracer = agl.AgentOpsTracer()
    async with tracer.trace_context(), client(chat) as asked:
        function = ChatCompletionMessageFunctionToolCall(
            id="c", type="function", function=Function(name="add", arguments="{}")
        )
        messages: list[Any] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [function]},
            {"role": "user", "content": "bye"},
        ]
        await asked.chat.completions.create(model="m", messages=iter(messages))
        raw = await asked.chat.completions.with_raw_response.create(model="m", messages=messages[:1])
        assert raw.parse().choices[0].message.content == "hello!"
    first, second = tracer.get_last_trace()
    assert '"name": "add"' in first.attributes["gen_ai.prompt.1.tool_calls"]
    assert first.attributes["gen_ai.completion.0.content"] == "bye!"
    assert second.attributes["gen_ai.completion.0.content"] == "hello!"


async def test_contexts_of_one_tracer_at_the_same_time_keep_their_spans_apart() -> None:
    tracer, store = agl.OtelTracer(), agl.InMemoryLightningStore()

    async def one(number: int) -> list[str]:
        started = await store.start_rollout(number)
        async with tracer.trace_context(store=store, **ids(started)):
            await asyncio.sleep(0)
            agl.emit_message(str(number))
            await asyncio.sleep(0)
        spans = await store.query_spans(started.rollout_id)
        return [str(agl.get_message_value(span)) for span in spans]

    assert list(await asyncio.gather(*(one(number) for number in range(5)))) == [[str(number)] for number in range(5)]
