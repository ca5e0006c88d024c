"""AgentJet's side of `grpo_step.py`: a loop over an OpenAI client, as a user would write it."""

from __future__ import annotations

import json
import random
from typing import Any

from _grpo_task import TOOL, calculator, question

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

MAX_CALLS = 3


class CalculatorAgent(Workflow):
    name: str = "calculator_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages: list[dict[str, Any]] = question(workflow_task.task.main_query)
        calls = 0
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(model="agent", messages=messages, tools=[TOOL])
            reply = completion.choices[0].message
            calls += 1
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                try:
                    result = calculator(json.loads(call.function.arguments)["expression"])
                except (ValueError, KeyError, TypeError):
                    result = "error: bad arguments"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return WorkflowOutput(reward=random.random(), log_metrics={"calls": calls})
