"""An agent that a workflow runs twice: the second conversation begins like the first and takes nobody's place.

The requests are those of smolagents 1.26: it sends a reply back as text of its own making.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "session"))
from session_parts import CONFIG, LineEngine, new_session

from ajet.tuner import AjetTuner

QUESTION = [
    {"role": "system", "content": [{"type": "text", "text": "You are an expert assistant."}]},
    {"role": "user", "content": [{"type": "text", "text": "New task:\nHow many?"}]},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]},
        },
    }
    for name, field in (("search", "query"), ("final_answer", "answer"))
]


def calling(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text(role: str, said: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": said}]}


async def agent_run(client: Any) -> str:
    """Ask until the model calls `final_answer`, as `ToolCallingAgent.run` does."""
    messages = list(QUESTION)
    while True:
        answer = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, tool_choice="required", stop=["Observation:"]
        )
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "final_answer":
            return str(arguments["answer"])
        made = {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
        messages += [
            text("assistant", f"{answer.choices[0].message.content}\nCalling tools:\n[{made}]"),
            text("user", f"Observation:\nfound {arguments['query']}"),
        ]


def drops(*lines: str, output: str | None = None) -> list[str | None]:
    """What is left out if the agent runs twice and the model says these lines."""

    async def main() -> list[str | None]:
        session = new_session(LineEngine(*lines))
        client = AjetTuner(session, CONFIG, asyncio.get_running_loop()).as_raw_openai_sdk_client()
        assert [await agent_run(client), await agent_run(client)] == ["41", "42"]
        return [call.drop for call in session.tracker.finish(1.0, output=output).tree.calls]

    return asyncio.run(main())


def test_the_first_run_is_trained_although_each_reply_is_rewritten() -> None:
    search = ["Let me look.\n" + calling("search", query=what) for what in ("cats", "dogs")]
    answers = [calling("final_answer", answer=answer) for answer in ("41", "42")]
    assert drops(search[0], answers[0], search[1], answers[1]) == [None] * 4
    assert drops(search[0], answers[0], answers[1]) == [None] * 3


def test_runs_of_one_call_are_told_from_a_retry_by_what_the_workflow_returns() -> None:
    answers = [calling("final_answer", answer=answer) for answer in ("41", "42")]
    assert drops(*answers) == ["abandoned", None]
    assert drops(*answers, output="41\n42") == [None, None]
