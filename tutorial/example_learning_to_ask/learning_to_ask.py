"""A doctor who asks: given a conversation with a patient, one question with options, or `<stop />`."""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "You are a doctor. Ask one question with two or three options, or write <stop /> if you know enough."


def prompt(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the model is asked."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, *conversation]


class LearningToAskWorkflow(Workflow):
    name: str = "learning_to_ask"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="doctor")
        messages = prompt(list(workflow_task.task.init_messages))
        completion = await client.chat.completions.create(messages=messages)
        return WorkflowOutput(reward=None, metadata={"reply": completion.choices[0].message.content or ""})
