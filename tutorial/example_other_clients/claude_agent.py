"""The math agent with Anthropic's SDK. Only the line that creates the client differs from an agent that uses Claude."""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM = "You solve math problems. Use the adder for every sum. Give the final answer as \\boxed{number}."
ADDER = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "number"}}}},
}


def add(given: dict[str, Any]) -> str:
    numbers = given.get("numbers")
    if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
        return "error: numbers must be a list of numbers"
    return f"{sum(numbers):g}"


class ClaudeAgentWorkflow(Workflow):
    name: str = "claude_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_anthropic_client(agent_name="solver")
        messages: list[Any] = [{"role": "user", "content": workflow_task.task.main_query}]
        answer = ""
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = await client.messages.create(
                model="claude", max_tokens=512, system=SYSTEM, tools=[ADDER], messages=messages
            )
            messages.append({"role": "assistant", "content": reply.content})
            if reply.stop_reason != "tool_use":
                answer = "".join(block.text for block in reply.content if block.type == "text")
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        return WorkflowOutput(metadata={"final_answer": answer})
