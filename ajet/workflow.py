"""`Workflow`, the class that users subclass, and what it takes and returns."""

from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_runner.workflow import Workflow

__all__ = ["Task", "Workflow", "WorkflowOutput", "WorkflowTask"]
