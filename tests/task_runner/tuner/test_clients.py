"""Real clients, unmodified: several turns with tools, whole and streamed, give one linear sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet.task_runner.tuner import AjetTuner
from support.frameworks import DESCRIPTION, PARAMETERS, QUESTIONS, SYSTEM, calculate, check, openai_tools

streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
places = pytest.mark.parametrize("near", [True, False], ids=["in_process", "http"])


@streams
@places
def test_openai(stream: bool, near: bool) -> None:
    async def ask(client: Any, messages: list[Any]) -> Any:
        if not stream:
            reply = await client.chat.completions.create(messages=messages, tools=openai_tools())
            return reply.choices[0].message
        async with client.chat.completions.stream(model="m", messages=messages, tools=openai_tools()) as events:
            async for _ in events:
                pass
            return (await events.get_final_completion()).choices[0].message

    async def job(tuner: AjetTuner) -> list[str]:
        client = tuner.as_raw_openai_sdk_client("solver")
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        answers = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while (message := await ask(client, messages)).tool_calls:
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    result = calculate(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            messages.append({"role": "assistant", "content": message.content})
            answers.append(message.content)
        return answers

    check(job, near=near)


@streams
@places
def test_anthropic(stream: bool, near: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        client = tuner.as_anthropic_client("solver")
        tools = [{"name": "calculate", "description": DESCRIPTION, "input_schema": PARAMETERS}]
        messages: list[Any] = []
        answers = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                request = {"model": "m", "max_tokens": 1000, "system": SYSTEM, "messages": messages, "tools": tools}
                if stream:
                    async with client.messages.stream(**request) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(**request)
                messages.append({"role": "assistant", "content": reply.content})
                if reply.stop_reason != "tool_use":
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": calculate(**block.input)}
                    for block in reply.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})
            answers.append(reply.content[-1].text)
        return answers

    check(job, near=near)


@streams
@places
def test_langgraph(stream: bool, near: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        agent = create_agent(tuner.as_langchain_model("solver"), tools=[tool(calculate)], system_prompt=SYSTEM)
        messages: list[Any] = []
        answers = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            if stream:
                async for mode, state in agent.astream({"messages": messages}, stream_mode=["messages", "values"]):
                    if mode == "values":
                        messages = state["messages"]
            else:
                messages = (await agent.ainvoke({"messages": messages}))["messages"]
            answers.append(messages[-1].content)
        return answers

    check(job, near=near)


def test_langgraph_blocking() -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from langchain.agents import create_agent
        from langchain_core.tools import tool

        agent = create_agent(tuner.as_langchain_model("solver"), tools=[tool(calculate)], system_prompt=SYSTEM)
        messages: list[Any] = []
        answers = []
        for question in QUESTIONS:
            messages = agent.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
            answers.append(messages[-1].content)
        return answers

    check(job)


@streams
@places
def test_agentscope(stream: bool, near: bool) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        from agentscope.agent import Agent, InjectionConfig
        from agentscope.message import UserMsg
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, Toolkit

        allow = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="test")
        agent = Agent(
            name="solver",
            system_prompt=SYSTEM,
            model=tuner.as_agentscope_model("solver", stream=stream),
            toolkit=Toolkit(tools=[FunctionTool(calculate, is_read_only=True, permission=allow)]),
            injection_config=InjectionConfig(inject_runtime_state=False),
        )
        return [(await agent.reply(UserMsg("user", question))).get_text_content() or "" for question in QUESTIONS]

    check(job, near=near)


@streams
def test_agentscope_with_its_runtime_state(stream: bool) -> None:
    """The time stamp that AgentScope 2 adds stays in its history, so it is context like any other."""

    async def job(tuner: AjetTuner) -> list[str]:
        from agentscope.agent import Agent
        from agentscope.message import UserMsg
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, Toolkit

        allow = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="test")
        agent = Agent(
            name="solver",
            system_prompt=SYSTEM,
            model=tuner.as_agentscope_model("solver", stream=stream),
            toolkit=Toolkit(tools=[FunctionTool(calculate, is_read_only=True, permission=allow)]),
        )
        return [(await agent.reply(UserMsg("user", question))).get_text_content() or "" for question in QUESTIONS]

    check(job)
