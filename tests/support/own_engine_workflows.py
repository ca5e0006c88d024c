"""Workflows for the tests of engines with weights of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class Talker(Workflow):
    """Two turns; the reward depends on what was said. With AJET_TEST_BEGAN, it says which steps have begun."""

    name: str = "talker"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="talker")
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = ""
        for turn in range(2):
            completion = await client.chat.completions.create(model="m", messages=messages)
            content = completion.choices[0].message.content or ""
            said += content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
            if turn == 0:
                self.between(workflow_task, tuner)
        return WorkflowOutput(reward=(sum(map(ord, said)) % 97) / 97)

    def between(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> None:
        folder = os.environ.get("AJET_TEST_BEGAN")
        if folder:
            (Path(folder) / f"began_{step_of(tuner)}").touch()


class Killer(Talker):
    """Kills the server, once, between the turns of an episode of step 2. AJET_TEST_KILL names a file that names the
    stand-in's log."""

    name: str = "killer"

    def between(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> None:
        order = Path(os.environ["AJET_TEST_KILL"])
        if step_of(tuner) != 2 or workflow_task.validation:
            return
        try:
            log = Path(order.read_text())
            order.unlink()
        except FileNotFoundError:  # another episode was faster
            return
        started = [body["pid"] for name, body in map(json.loads, log.read_text().splitlines()) if name == "start"]
        os.kill(started[-1], signal.SIGKILL)


def step_of(tuner: AjetTuner) -> int:
    """The training step that the episode was drawn for."""
    return tuner._session.settings.seed_key.step
