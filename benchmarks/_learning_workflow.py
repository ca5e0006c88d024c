"""What `learning_runs.py` trains: a writer is paid for vowels, by one of several rewards; a critic may listen."""

from __future__ import annotations

import random

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class SayVowels(Workflow):
    """One reply. `ajet.user.reward` names its reward; held-out questions are always paid by the share of vowels."""

    name: str = "say_vowels"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        said = await say(tuner, "writer", workflow_task.task.main_query or "")
        share = sum(letter in "aeiouAEIOU" for letter in said) / max(1, len(said))
        kind = tuner.config.ajet.user.reward
        if workflow_task.task.metadata.get("held_out") or kind == "continuous":
            reward = share
        elif kind == "negative":
            reward = -3.0 * (1.0 - share) ** 2
        else:
            assert kind == "shuffled"
            reward = random.random()
        return WorkflowOutput(reward=reward, is_success=share > 0.5)


class WithCritic(SayVowels):
    """The critic answers what the writer said, and is asked for more."""

    name: str = "with_critic"
    trainable_targets: list[str] | None = ["writer"]  # noqa: RUF012 (a field, not a class attribute)

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, tuner)
        await say(tuner, "critic", "what do you say to this?")
        return output


async def say(tuner: AjetTuner, agent: str, question: str) -> str:
    client = tuner.as_raw_openai_sdk_client(agent_name=agent, target_tag=agent)
    answer = await client.chat.completions.create(model="tuned", messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""
