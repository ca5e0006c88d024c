"""A workflow that asks twice and is paid for vowels, for runs on models that are made in the test."""

AGENTS = """\
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        messages, letters = [], []
        for question in ("one?", "two?"):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            letters += messages[-1]["content"]
        return WorkflowOutput(reward=sum(each in "aeiou" for each in letters) / max(1, len(letters)))
"""
