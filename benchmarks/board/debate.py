"""The board's debate: as in tutorial/example_multi_agent, with a reward that a random model can learn.

A solver proposes, a checker objects, the solver answers again, and a referee, who is not trained, decides. The reward
is the share of vowels in what the two trained ones said; how the referee talks is measured beside it.
"""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

TRAINED = ["solver", "checker"]


class VowelDebate(Workflow):
    name: str = "vowel_debate"
    trainable_targets: list[str] | None = TRAINED

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        async def say(role: str, text: str) -> str:
            client = tuner.as_raw_openai_sdk_client(agent_name=role, target_tag=role)
            messages = [{"role": "system", "content": role}, {"role": "user", "content": text}]
            return (await client.chat.completions.create(messages=messages)).choices[0].message.content or ""

        solution = await say("solver", "begin")
        objection = await say("checker", solution)
        answer = await say("solver", objection)
        verdict = await say("referee", answer)
        reward = sum(map(share_of_vowels, (solution, objection, answer))) / 3
        return WorkflowOutput(reward=reward, log_metrics={"referee": share_of_vowels(verdict)})


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
