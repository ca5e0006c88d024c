"""How the agent works on one task. Change this file first."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "Answer with the number alone."


class MyWorkflow(Workflow):
    """Asks the model once and compares its answer with the task's.

    `client` is an OpenAI client: call it as often as you like, with tools, from several agents, or give
    `tuner.as_oai_baseurl_apikey()` to any framework. Every call is recorded and trained.
    """

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        task = workflow_task.task
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": task.main_query},
            ],
        )
        answer = reply.choices[0].message.content or ""
        right = str(task.metadata["answer"]) in answer.split()
        return WorkflowOutput(
            reward=1.0 if right else 0.5 * share_of_digits(answer),
            is_success=right,
            metadata={"answer": answer},
        )


def share_of_digits(text: str) -> float:
    """Partial reward for writing digits: without it, a model that is always wrong has nothing to learn from."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)
