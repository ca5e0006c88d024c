"""`TestsJudge` (`judge_type: tests`): runs the task's tests on what the agent left in the episode's sandbox.

The task's metadata holds `test_command` and `test_files`; `ajet.agents.task_tests` says how they are run. If the agent
made its work untestable, the reward is 0. Without a sandbox or a `test_command`, the judge fails.
"""

from __future__ import annotations

from ajet.agents.task_tests import judge_by_tests
from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Judgement


class TestsJudge(BaseJudge):
    """1 if the tests pass, else 0. What they printed is in the episode's `metadata["judge"]`."""

    reads_task = ("test_command",)

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        sandbox, metadata = workflow_task.sandbox, workflow_task.task.metadata
        if sandbox is None:
            raise JudgeFault(
                "judge_type: tests judges what is in the episode's sandbox, and there is none where the judge runs: "
                "set ajet.rollout.sandbox, and run episodes in a thread or process of this machine"
            )
        command = metadata.get("test_command")
        if not isinstance(command, str) or not command:
            raise JudgeFault(f"judge_type: tests needs a `test_command` in the task's metadata, not {command!r:.100}")
        verdict = await judge_by_tests(sandbox, metadata, command, base_dirs=self.config.base_dirs)
        return Judgement(float(verdict.passed), verdict.passed, notes={"tests": verdict.facts()})
