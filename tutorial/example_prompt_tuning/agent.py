"""An agent that books rooms: it may search with one tool, then names a room. Its instruction is a prompt template."""

from __future__ import annotations

import json
import re
from typing import Any

from rooms import Request, find, judge

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

MOST_CALLS = 3
PARAMETERS = ("seats", "device", "time", "order")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in PARAMETERS},
            "required": [],
        },
    },
}


class RoomAgent(Workflow):
    """Searches and answers."""

    name: str = "booker"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        task = workflow_task.task
        client = tuner.as_raw_openai_sdk_client()
        instruction = tuner.prompt("booker").format(request=task.main_query)
        messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
        looked = False
        for _ in range(MOST_CALLS):
            completion = await client.chat.completions.create(model="booker", messages=messages, tools=[TOOL])
            reply = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                break
            looked = True
            for call in reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": search(call.function.arguments)})
        wish = Request(task.metadata["people"], task.metadata["device"], task.metadata["hour"])
        named = re.search(r"[Rr]oom (\d)", reply.content or "")
        reward, feedback = judge(wish, int(named[1]) if named else None, looked=looked)
        return WorkflowOutput(reward=reward, is_success=reward == 1.0, metadata={"feedback": feedback})


def search(arguments: str) -> str:
    """The tool: numbers of rooms, or what is wrong with the arguments."""
    try:
        given = json.loads(arguments)
        rooms = find(
            seats=int(given.get("seats", 0)),
            device=str(given.get("device", "")),
            time=int(given["time"]) if "time" in given else None,
            order=str(given.get("order", "")),
        )
    except (ValueError, TypeError, AttributeError) as error:
        return f"error: {error}"
    return " ".join(map(str, rooms)) or "none"
