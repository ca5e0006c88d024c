"""A workflow whose replies end at stop strings, or fail: its episodes are uneven."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class Stopper(Workflow):
    """Two turns. The task `long` has no stop strings, so its replies are cut by their length."""

    name: str = "stopper"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="stopper")
        query = workflow_task.task.main_query or ""
        stops = None if query == "long" else ["a", "e", "n", "o"]
        messages = [{"role": "user", "content": query}]
        said = ""
        for _ in range(2):
            completion = await client.chat.completions.create(model="m", messages=messages, stop=stops)
            said = completion.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        total = sum(map(ord, "".join(str(message["content"]) for message in messages)))
        if total % 5 == 0:
            raise RuntimeError("it fell over")
        return WorkflowOutput(reward=(total % 97) / 97)
