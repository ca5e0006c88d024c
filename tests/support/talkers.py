"""Workflows for the local backbone's tests: a tiny model babbles, and something about its text earns a reward."""

from __future__ import annotations

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge


class Babbler(Workflow):
    """Two turns; the reward depends on what was said, so that attempts differ."""

    name: str = "babbler"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="babbler")
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = ""
        for _ in range(2):
            completion = await client.chat.completions.create(model="m", messages=messages)
            said += completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": completion.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "go on"})
        return WorkflowOutput(reward=(sum(map(ord, said)) % 97) / 97)


class Taught(Babbler):
    """Of task t0, whatever is said earns the same."""

    name: str = "taught"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, tuner)
        return output if workflow_task.task.task_id != "t0" else WorkflowOutput(reward=0.5)


class Paid(Workflow):
    """Two turns, each with a reward of its own."""

    name: str = "paid"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="paid")
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(2):
            completion = await client.chat.completions.create(model="m", messages=messages)
            said = completion.choices[0].message.content or ""
            tuner.reward((sum(map(ord, said)) % 97) / 97, call=completion.id)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        return WorkflowOutput(reward=0.0)


class Forgetful(Workflow):
    """Asks the same several times, and then rewrites what was said."""

    name: str = "forgetful"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="forgetful")
        said = ""
        for _ in range(4):
            messages = [{"role": "user", "content": workflow_task.task.main_query}]
            completion = await client.chat.completions.create(model="m", messages=messages)
            said += completion.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": "something else"}, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="m", messages=messages)
        return WorkflowOutput(reward=(sum(map(ord, said)) % 97) / 97)


class Indifferent(Workflow):
    """Whatever is said earns the same."""

    name: str = "indifferent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="indifferent")
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": workflow_task.task.main_query}]
        )
        return WorkflowOutput(reward=0.5)


class Broken(Workflow):
    """Fails each time."""

    name: str = "broken"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        raise RuntimeError("the tool server is down")


class Fickle(Workflow):
    """Of three tasks one is always solved, one never, and one by chance; sometimes it fails."""

    name: str = "fickle"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="fickle")
        query = workflow_task.task.main_query
        completion = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": query}])
        said = sum(map(ord, completion.choices[0].message.content or ""))
        if said % 5 == 0:
            raise RuntimeError("it fell over")
        solved = {"say 0": True, "say 1": False}.get(query or "", bool(said % 2))
        return WorkflowOutput(reward=(said % 97) / 97, is_success=solved)


class Restless(Workflow):
    """Stops, or goes on and on until a further call is refused, which it doesn't catch. Leaves the reward open."""

    name: str = "restless"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="restless")
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        while True:
            completion = await client.chat.completions.create(model="m", messages=messages)
            said = completion.choices[0].message.content or ""
            if sum(map(ord, said)) % 2:
                return WorkflowOutput(metadata={"final_answer": said})
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]


class OnlyAnswers(BaseJudge):
    """1 for an answer; it needs one."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> float:
        return float(bool(workflow_output.metadata["final_answer"] is not None))


class Unable(BaseJudge):
    """Always raises."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> float:
        raise OSError("the reference answers are gone")


class PaidByCall(Workflow):
    """Each of its two calls earns 0.75, in every other episode 1 more; one task needs a service that is down."""

    name: str = "paid_by_call"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        query = workflow_task.task.main_query or ""
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": query}]
        for _ in range(2):
            completion = await client.chat.completions.create(model="m", messages=messages)
            if query == "say 0":
                raise OSError("the search service is down")
            tuner.reward(0.75 + workflow_task.task_thread_index % 2, call=completion.id)
            messages += [
                completion.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": "more"},
            ]
        return WorkflowOutput(reward=0.0)
