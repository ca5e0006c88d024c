"""Agents that are programs in any language. They get an address, a key and a model name, and print their answer.

`NodeAgentWorkflow` runs `agent.mjs` (npm's `openai`), and `ShellAgentWorkflow` runs `agent.sh` (curl). The gateway
records their model calls; the last line they print is the answer.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

HERE = Path(__file__).parent


async def run_agent(command: list[str], task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
    endpoint = tuner.as_oai_baseurl_apikey(agent_name="solver")
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "MODEL": endpoint.model,
        "QUESTION": task.task.main_query,
    }
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # the episode has ended, so its agent must end too
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {errors.decode()[-500:]}")
    lines = output.decode().strip().splitlines()
    return WorkflowOutput(metadata={"final_answer": lines[-1] if lines else ""})


class NodeAgentWorkflow(Workflow):
    name: str = "node_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        folder = Path(tuner.config.ajet.user.get("node_folder", HERE))
        return await run_agent(["node", str(folder / "agent.mjs")], workflow_task, tuner)


class ShellAgentWorkflow(Workflow):
    name: str = "shell_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        return await run_agent(["sh", str(HERE / "agent.sh")], workflow_task, tuner)
