"""`/v1/messages`: what clients make of a reply when they send it back still continues it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))
sys.path.insert(0, str(Path(__file__).parents[1] / "session"))
from gateway_parts import place, post
from session_parts import CALL, LineEngine

from ajet.gateway.anthropic_messages import STAND_INS

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
