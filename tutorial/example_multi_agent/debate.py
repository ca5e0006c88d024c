"""Two trained roles and a frozen one: a solver proposes, a checker objects, and a referee, who is not trained, decides.

Each role is an agent with its own conversation. `trainable_targets` names what is trained; the referee's calls are
recorded but not trained. With `debug_model=`, the referee could be any model at an OpenAI-compatible endpoint.
"""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

PROMPTS = {
    "solver": "You solve math problems step by step.",
    "checker": "You look for the first mistake in a solution. If there is none, say so.",
    "referee": "You read a problem, a solution and objections, and give the final answer as \\boxed{number}.",
}


class Role:
    """One agent, which remembers what it was told and what it said."""

    def __init__(self, name: str, tuner: AjetTuner) -> None:
        self._client = tuner.as_raw_openai_sdk_client(agent_name=name, target_tag=name)
        self._messages: list[Any] = [{"role": "system", "content": PROMPTS[name]}]

    async def say(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        reply = (await self._client.chat.completions.create(messages=self._messages)).choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": reply})
        return reply


class DebateWorkflow(Workflow):
    name: str = "debate"
    trainable_targets: list[str] | None = ["solver", "checker"]  # noqa: RUF012 - a pydantic field

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        problem = workflow_task.task.main_query
        solver, checker, referee = (Role(name, tuner) for name in PROMPTS)
        solution = await solver.say(problem)
        objection = await checker.say(f"Problem: {problem}\n\nSolution: {solution}")
        solution = await solver.say(f"A colleague says: {objection}\nAnswer again.")
        objection = await checker.say(f"The new solution: {solution}")
        verdict = await referee.say(f"Problem: {problem}\n\nSolution: {solution}\n\nObjections: {objection}")
        return WorkflowOutput(metadata={"final_answer": verdict})
