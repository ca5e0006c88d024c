"""The workflow and judge of `faulty_run.py`; the task says how each of them fails."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge


class FaultyAgent(Workflow):
    """One model call, then the deed."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        deed = workflow_task.task.metadata["deed"]
        client = tuner.as_raw_openai_sdk_client()
        message = {"role": "user", "content": workflow_task.task.main_query}
        await client.chat.completions.create(model="any", messages=[message])
        if deed == "raise":
            raise ValueError("as asked")
        if deed == "hang_await":
            await asyncio.sleep(3600)
        if deed == "hang_blocking":
            while True:
                time.sleep(0.05)
        if deed == "os_exit":
            os._exit(13)
        if deed == "segfault":
            ctypes.string_at(0)
        return WorkflowOutput(metadata={"deed": deed})


class FaultyJudge(BaseJudge):
    """1.0, or no number."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        deed = workflow_output.metadata["deed"]
        if deed == "judge_nan":
            return float("nan"), False
        if deed == "judge_none":
            return None
        if deed == "judge_raise":
            raise ConnectionError("as asked")
        return 1.0, True
