"""What an answer is worth. Change this file first."""

from __future__ import annotations

from ajet import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge


class Judge(BaseJudge):
    """Compares the agent's final answer with the task's."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        answer = workflow_output.metadata.get("final_answer") or workflow_output.metadata.get("last_reply") or ""
        right = str(workflow_task.task.metadata["answer"]) in answer.split()
        return (1.0 if right else 0.5 * share_of_digits(answer)), right


def share_of_digits(text: str) -> float:
    """Partial reward for writing digits: without it, a model that is always wrong has nothing to learn from."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)
