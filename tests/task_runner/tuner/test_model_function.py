"""The model function: plain messages in, a plain message out, from any thread and event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from ajet.agents.model_function import ModelFunction, as_model_function
from ajet.gateway import Gateway
from ajet.gateway.chat import SessionSettings
from ajet.schema.errors import ConfigError
from ajet.task_runner.tuner import AjetTuner, HelperModel
from support.frameworks import ANSWERS, QUESTIONS, SYSTEM, calculate, check, openai_tools
from support.session_parts import CALL, CONFIG, TOOLS, USER, LineEngine, new_session

places = pytest.mark.parametrize("near", [True, False], ids=["in_process", "http"])


async def agent(model: ModelFunction, messages: list[Any], question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        message = await model(messages, tools=openai_tools())
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            result = calculate(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


@places
def test_an_agent_of_plain_python(near: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        model = tuner.as_model_function("solver")
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        return [await agent(model, messages, question) for question in QUESTIONS]

    check(job, near=near)


@places
def test_every_call_may_be_on_another_loop(near: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        model = tuner.as_model_function("solver")
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]

        def blocking() -> list[str]:
            return [asyncio.run(agent(model, messages, question)) for question in QUESTIONS]

        return await asyncio.to_thread(blocking)

    check(job, near=near)


def run(workflow: Any, *lines: Any, **settings: Any) -> Any:
    async def main() -> Any:
        session = new_session(LineEngine(*lines), SessionSettings(**settings))
        gateway = Gateway()
        await gateway.start()
        tuner = AjetTuner(session, CONFIG, asyncio.get_running_loop(), gateway)
        await asyncio.to_thread(lambda: asyncio.run(workflow(tuner)))
        await gateway.aclose()
        return session

    return asyncio.run(main())


def test_messages_are_whole_and_sampling_is_passed_on() -> None:
    async def workflow(tuner: AjetTuner) -> None:
        model = tuner.as_model_function("solver")
        message = await model(USER, tools=TOOLS, max_tokens=400, top_k=3, seed=None)
        assert message["role"] == "assistant" and message["content"] == "Well."
        assert message["reasoning_content"] == "Hm."
        (call,) = message["tool_calls"]
        assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert set(call) == {"id", "type", "function"}
        with pytest.raises(openai.BadRequestError, match="top_k"):
            await model(USER, top_k="three")
        with pytest.raises(TypeError, match="stream"):
            await model(USER, stream=True)
        with pytest.raises(TypeError, match="nor n"):
            await model(USER, n=2)

    session = run(workflow, f"<think>Hm.</think>Well.{CALL}", training=False)
    (call,) = session.tracker.calls
    assert call.sampling.top_k == 3 and call.agent == "solver"


def test_targets_that_are_not_trained_use_the_debug_model() -> None:
    async def canned(messages: Any, *, tools: Any = None, **sampling: Any) -> Any:
        return {"role": "assistant", "content": f"canned {len(messages)}"}

    async def workflow(tuner: AjetTuner) -> None:
        model = tuner.as_model_function(target_tag="judge", debug_model=canned)
        assert (await model(USER))["content"] == "canned 1"
        base_url, api_key, _ = tuner.as_oai_baseurl_apikey()
        elsewhere = HelperModel("ajet-elsewhere", base_url, api_key)
        with pytest.raises(openai.PermissionDeniedError):
            await tuner.as_model_function(target_tag="judge", debug_model=elsewhere)(USER)
        with pytest.raises(ConfigError, match="of type int"):
            tuner.as_model_function(target_tag="judge", debug_model=3)
        trained = tuner.as_model_function(target_tag="solver", debug_model=canned)
        assert (await trained(USER))["content"] == "hi"

    assert len(run(workflow, "hi", trainable_targets=("solver",)).tracker.calls) == 1


def test_clients_as_model_functions() -> None:
    """OpenAI's own clients, blocking and not, over HTTP."""

    async def workflow(tuner: AjetTuner) -> None:
        base_url, api_key, name = tuner.as_oai_baseurl_apikey()
        for client in (openai.OpenAI, openai.AsyncOpenAI):
            model = as_model_function(client(base_url=base_url, api_key=api_key), name)
            assert await model(USER, top_k=3) == {"role": "assistant", "content": ANSWERS[0]}
        with pytest.raises(ConfigError, match="name of the model"):
            as_model_function(client(base_url=base_url, api_key=api_key))

    assert len(run(workflow, ANSWERS[0]).tracker.calls) == 2
