"""Agents of other libraries, unmodified, over HTTP: run by `make test-clients`, which builds their environment.

Each answers two questions with a tool; their calls must form one linear sample in which every sampled token is trained.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest

from ajet.task_runner.tuner import AjetTuner
from support.frameworks import QUESTIONS, SYSTEM, calculate, check, openai_tools


def needs(*modules: str) -> Any:
    specs = {name: importlib.util.find_spec(name) for name in modules}
    # a folder beside the tests, such as `agents`, is found too, but has no loader
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
openai_agents = needs("agents")
pydantic_ai = needs("pydantic_ai")
litellm = needs("litellm")


def openai_agent(tuner: AjetTuner, protocol: str) -> Any:
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    return Agent(
        name="solver",
        instructions=SYSTEM,
        tools=[function_tool(calculate)],
        model=kinds[protocol](model=model, openai_client=client),
    )


@openai_agents
@streams
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_openai_agents(protocol: str, stream: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from agents import Runner

        agent = openai_agent(tuner, protocol)
        history: list[Any] = []
        answers = []
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            if stream:
                ran: Any = Runner.run_streamed(agent, history)
                async for _ in ran.stream_events():
                    pass
            else:
                ran = await Runner.run(agent, history)
            history = ran.to_input_list()
            answers.append(ran.final_output)
        return answers

    check(job, near=False)


@openai_agents
def test_openai_agents_blocking() -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from agents import Runner

        agent = openai_agent(tuner, "responses")

        def blocking() -> list[str]:
            history: list[Any] = []
            answers = []
            for question in QUESTIONS:
                ran = Runner.run_sync(agent, [*history, {"role": "user", "content": question}])
                history = ran.to_input_list()
                answers.append(ran.final_output)
            return answers

        return await asyncio.to_thread(in_own_loop, blocking)

    check(job, near=False)


def in_own_loop(function: Any) -> Any:
    """As a plain `execute` is called: the thread has a loop that isn't running."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    return function()


def pydantic_agent(tuner: AjetTuner, protocol: str) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
    kinds = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    return Agent(kinds[protocol](model, provider=provider), instructions=SYSTEM, tools=[calculate])


@pydantic_ai
@streams
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_pydantic_ai(protocol: str, stream: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from pydantic_ai import Agent

        agent = pydantic_agent(tuner, protocol)
        history: list[Any] = []
        answers = []
        for question in QUESTIONS:
            if stream:
                async with agent.iter(question, message_history=history) as run:
                    async for node in run:
                        if Agent.is_model_request_node(node):
                            async with node.stream(run.ctx) as events:
                                async for _ in events:
                                    pass
                result = run.result
            else:
                result = await agent.run(question, message_history=history)
            history = result.all_messages()
            answers.append(result.output)
        return answers

    check(job, near=False)


@pydantic_ai
def test_pydantic_ai_blocking() -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        agent = pydantic_agent(tuner, "chat")

        def blocking() -> list[str]:
            history: list[Any] = []
            answers = []
            for question in QUESTIONS:
                result = agent.run_sync(question, message_history=history)
                history = result.all_messages()
                answers.append(result.output)
            return answers

        return await asyncio.to_thread(in_own_loop, blocking)

    check(job, near=False)


@litellm
@streams
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_litellm(stream: bool, protocol: str) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        import litellm

        base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
        if protocol == "anthropic":
            base_url = base_url.removesuffix("/v1")
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        answers = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                reply: Any = await litellm.acompletion(
                    model=f"{protocol}/{model}",
                    api_base=base_url,
                    api_key=api_key,
                    messages=messages,
                    tools=openai_tools(),
                    stream=stream,
                )
                if stream:
                    reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = calculate(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            answers.append(message.content)
        return answers

    check(job, near=False)


@litellm
@needs("agentscope")
def test_litellm_beside_agentscope() -> None:
    """Both in one environment: their ranges of `mcp` meet."""
    import agentscope.mcp
    import litellm

    assert agentscope.mcp and litellm.acompletion
