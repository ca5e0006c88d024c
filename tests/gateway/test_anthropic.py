"""`/v1/messages`: what clients make of a reply when they send it back still continues it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet.gateway.anthropic_messages import STAND_INS
from support.gateway_parts import place, post
from support.session_parts import CALL, LineEngine

TOOLS = [{"name": "f", "description": "F", "input_schema": {"type": "object"}}]
ASK = {"role": "user", "content": "hello"}


def extends(*texts: str, said: str = CALL) -> list[int]:
    """What each call continues, if a reply that calls a tool is sent back with these texts before the call."""

    async def run() -> list[int]:
        async with place(LineEngine(said)) as here:
            body: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": TOOLS, "messages": [ASK]}
            reply = (await post(here, "/v1/messages", body)).json()
            calls = [block for block in reply["content"] if block["type"] == "tool_use"]
            blocks = [*({"type": "text", "text": text} for text in texts), *calls]
            result = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "done"}
            body["messages"] += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            assert (await post(here, "/v1/messages", body)).status == 200
            return [call.extends for call in here.session.tracker.finish(None).tree.calls]

    return asyncio.run(run())


@pytest.mark.parametrize("texts", [[], [""], [STAND_INS[0]]])
def test_a_call_without_text_comes_back_with_what_stands_for_none(texts: list[str]) -> None:
    assert extends(*texts) == [-1, 0]


def test_any_other_text_is_another_reply() -> None:
    assert extends("by the way") == [-1, -1]
    assert extends(STAND_INS[0], said=f"by the way\n{CALL}") == [-1, -1]


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_schema_for_the_answer_is_asked_for_and_checked(where: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object", "required": ["answer"]}}
    body: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": [ASK]}

    async def run(given: dict[str, Any], **more: Any) -> tuple[int, bytes]:
        async with place(LineEngine("{}")) as here:
            field = {"format": given} if where == "output_config" else given
            reply = await post(here, "/v1/messages", {**body, where: field, **more})
            return reply.status, reply.body

    for stream in (False, True):
        status, said = asyncio.run(run(wanted, stream=stream))
        assert status == 200 and b"response_format: " in said and b"answer" in said
    for wrong in ({"type": "regex"}, {"type": "json_schema"}):
        status, said = asyncio.run(run(wrong))
        assert status == 400 and where.encode() in said


def test_what_would_change_the_request_is_refused() -> None:
    async def run() -> Any:
        async with place(LineEngine("hi")) as here:
            body = {"model": "m", "max_tokens": 99, "messages": [ASK], "container": "box"}
            return (await post(here, "/v1/messages", body)).json()

    assert "container is not supported" in asyncio.run(run())["error"]["message"]


def test_a_choice_of_a_tool_needs_its_name() -> None:
    async def run() -> str:
        async with place(LineEngine("{}")) as here:
            tools = [{"name": "f", "input_schema": {"type": "object"}}]
            body = {"model": "m", "max_tokens": 9, "messages": [ASK], "tools": tools, "tool_choice": {"type": "tool"}}
            reply = await post(here, "/v1/messages", body)
            assert reply.status == 400
            return str(reply.json()["error"]["message"])

    assert "not among the tools" in asyncio.run(run())
