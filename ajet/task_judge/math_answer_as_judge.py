"""`MathAnswerAsJudge`: right or wrong, by the reference answer that the task carries."""

from __future__ import annotations

from typing import Any

from ajet.schema.errors import JudgeFault
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_judge.math_answers import same_answer


class MathAnswerAsJudge(BaseJudge):
    """1.0 if `workflow_output.metadata["final_answer"]` is the answer in `task.metadata["answer"]`, else 0.0.

    An agent that gave no answer (`None` or empty) is wrong. A workflow that does not report one at all, or a task
    without a reference, is a mistake in the set-up and fails the episode by name.
    """

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        task = workflow_task.task
        given = self._read(workflow_output.metadata, "final_answer", "the workflow's WorkflowOutput(metadata={…})")
        expected = self._read(task.metadata, "answer", f"the metadata of task {task.task_id!r}")
        if expected is None or not str(expected).strip():
            raise JudgeFault(f"MathAnswerAsJudge: task {task.task_id!r} has an empty reference answer")
        right = given is not None and same_answer(str(given), str(expected))
        return (1.0 if right else 0.0), right

    @staticmethod
    def _read(metadata: dict[str, Any], key: str, owner: str) -> Any:
        if key not in metadata:
            present = ", ".join(map(repr, metadata)) or "nothing"
            raise JudgeFault(f"MathAnswerAsJudge needs {key!r} in {owner}; it holds {present}")
        return metadata[key]
