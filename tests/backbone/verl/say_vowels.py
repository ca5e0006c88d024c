"""A two-turn workflow whose reward a tiny model can learn in a few dozen steps: the share of vowels in its replies."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

TURNS = 2


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
        vowels = sum(letter in "aeiouAEIOU" for letter in said)
        return WorkflowOutput(reward=vowels / max(1, len(said)), is_success=vowels > len(said) / 2)
