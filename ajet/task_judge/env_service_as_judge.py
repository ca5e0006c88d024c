"""`EnvServiceJudge`: the episode's environment gives the reward.

Let r be the result of `evaluate`. An episode with r ≥ 1 is a success with reward 1 + 0.5 r; any other gets 0.5 r.
"""

from __future__ import annotations

from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge


class EnvServiceJudge(BaseJudge):
    """Works with every environment: one without an `evaluate` of its own gives the sum of its steps' rewards."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        if workflow_task.gym_env is None:
            raise JudgeFault(
                "EnvServiceJudge asks the episode's environment, and there is none: set ajet.rollout.environment, or "
                "ajet.task_reader.type: env_service"
            )
        raw = float(workflow_task.gym_env.evaluate(params={"sparse": False}))
        success = raw >= 1
        return (1.0 if success else 0.0) + 0.5 * raw, success
