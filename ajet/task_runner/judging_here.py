"""`judge_here`: the judge's reward for a workflow that ran elsewhere. It is user code: it gets a thread of its own."""

from __future__ import annotations

import asyncio

from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import EndedEarly
from ajet.task_runner.outside_loop import run_with_pauses
from ajet.task_runner.results import EarlyEnding, WorkflowResult, judge_result


async def judge_here(
    result: WorkflowResult, judge: BaseJudge | None, task: WorkflowTask, ended_early: EndedEarly, retries: int
) -> None:
    """Ask the judge if the result has no reward, and note what it says."""
    if judge is None or result.failed_in == "isolation":
        return
    early = None if result.finished else ended_early(result.explained)
    output = WorkflowOutput(is_success=result.is_success, metadata=result.metadata, log_metrics=result.log_metrics)

    async def ask_ending(explained: bool) -> EarlyEnding | None:
        return early

    def ask() -> None:
        with asyncio.Runner() as loop:
            work = judge_result(result, judge, task, output, retries, ask_ending)
            run_with_pauses(loop.get_loop(), work)

    await asyncio.to_thread(ask)
