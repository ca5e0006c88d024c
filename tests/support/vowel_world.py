"""An environment whose reward a tiny model can learn: the share of vowels in what it is told, over two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.environment import Environment, StepResult
from ajet.schema.task import Task

STEPS = 2


class VowelWorld(Environment):
    """Writes each beginning and each end into `log`."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._steps = 0

    def reset(self, task: Task) -> str:
        self._write(f"reset {task.task_id}")
        return task.main_query or ""

    def step(self, action: Any) -> StepResult:
        said = action["content"]
        self._steps += 1
        vowels = sum(letter in "aeiouAEIOU" for letter in said)
        return StepResult("more", vowels / max(1, len(said)), self._steps == STEPS, {})

    def close(self) -> None:
        self._write("close")

    def _write(self, line: str) -> None:
        with Path(self._log).open("a") as file:
            file.write(line + "\n")


class SpeaksToTheWorld(Workflow):
    """Acts until the world says that it's over. The mean reward of the steps is the episode's."""

    name: str = "speaks_to_the_world"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        world, client = workflow_task.gym_env, tuner.as_raw_openai_sdk_client()
        messages = list(workflow_task.task.init_messages)
        done, total = False, 0.0
        while not done:
            answer = await client.chat.completions.create(model="tuned", messages=messages)
            action = {"role": "assistant", "content": answer.choices[0].message.content or ""}
            observation, reward, done, _ = world.step(action)
            total += reward
            messages += [action, {"role": "user", "content": observation}]
        return WorkflowOutput(reward=total / STEPS)
