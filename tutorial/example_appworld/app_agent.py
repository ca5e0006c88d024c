"""An agent that uses apps by writing Python, in AppWorld or in the small world: whatever the YAML names.

One conversation per episode: the environment's first messages, then a block of code and its output, until the world
says that the task is complete. The environment judges (`EnvServiceJudge`).
"""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class AppAgentWorkflow(Workflow):
    name: str = "app_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        env = workflow_task.gym_env
        client = tuner.as_raw_openai_sdk_client(agent_name="assistant")
        messages: list[Any] = list(workflow_task.task.init_messages)
        steps, done = 0, False
        while not done and steps < tuner.config.ajet.rollout.multi_turn.max_steps:
            completion = await client.chat.completions.create(messages=messages)
            action = {"role": "assistant", "content": completion.choices[0].message.content or ""}
            observation, _, done, _ = await env.astep(action)
            messages += [action, {"role": "user", "content": observation}]
            steps += 1
        return WorkflowOutput(reward=None, metadata={"total_step": steps}, log_metrics={"steps": steps, "ended": done})
