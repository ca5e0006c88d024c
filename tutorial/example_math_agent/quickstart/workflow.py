"""The quickstart's agent: asks the calculator, then answers. Two model calls per episode, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "Use the calculator, then answer."

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

MAX_CALLS = 3


def calculator(expression: str) -> str:
    """Whole numbers with + - and *, without brackets, which is all that the tasks need."""
    total, term, operator, sign = 0, 0, "", 1
    number = ""
    for character in [*expression.replace(" ", ""), "="]:
        if character.isdecimal():
            number += character
            continue
        if not number or character not in "+-*=":
            return "error: only whole numbers, + - and *"
        term = term * int(number) if operator == "*" else int(number)
        if character != "*":
            total, sign = total + sign * term, -1 if character == "-" else 1
        operator, number = character, ""
    return str(total)


class QuickstartWorkflow(Workflow):
    name: str = "quickstart"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="math_agent")
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        answer = ""
        tool_calls = 0
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(model="math_agent", messages=messages, tools=TOOLS)
            reply = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                answer = reply.content or ""
                break
            for call in reply.tool_calls:
                tool_calls += 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})
        right = answer.strip() == f"\\boxed{{{workflow_task.task.metadata['answer']}}}"
        return WorkflowOutput(
            reward=float(right), is_success=right, log_metrics={"tool_calls": tool_calls}, metadata={"answer": answer}
        )


def run(arguments: str) -> str:
    """Run a tool call as the model wrote it."""
    try:
        return calculator(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return 'error: the arguments must be {"expression": "…"}'
