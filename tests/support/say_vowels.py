"""A two-turn workflow whose reward a tiny model can learn in a few dozen steps: the share of vowels in its replies."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

TURNS = 2
WITH_CRITIC = "t1"
"""The first episode of this task asks a second agent too, and so gives two rows."""


class SayVowels(Workflow):
    """Asks twice; the second prompt extends the first reply."""

    name: str = "say_vowels"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query or ""}]
        said = ""
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model="tuned", messages=messages)
            text = answer.choices[0].message.content or ""
            said += text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        if workflow_task.task_id == WITH_CRITIC and workflow_task.task_thread_index == 0:
            critic = tuner.as_raw_openai_sdk_client(agent_name="critic")
            await critic.chat.completions.create(model="tuned", messages=[{"role": "user", "content": said or "?"}])
        vowels = sum(letter in "aeiouAEIOU" for letter in said)
        return WorkflowOutput(reward=vowels / max(1, len(said)), is_success=vowels > len(said) / 2)
