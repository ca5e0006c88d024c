"""One call: the model answers, and the judge sees the answer."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class AnswerWorkflow(Workflow):
    """Asks for the task's answer. There is no reward here: the rubrics give it."""

    name: str = "answer"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        reply = await client.chat.completions.create(messages=messages)
        return WorkflowOutput(reward=None, metadata={"final_answer": reply.choices[0].message.content or ""})
