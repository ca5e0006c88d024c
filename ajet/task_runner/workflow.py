"""`Workflow`: the class that users subclass to define how an agent works on one task."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ajet.schema.task import WorkflowOutput, WorkflowTask

if TYPE_CHECKING:
    from ajet.task_runner.tuner import AjetTuner


class Workflow(BaseModel):
    """How an agent works on one task. Each episode runs a fresh instance `cls(name=…)`, so fields may hold state."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    name: str = ""
    trainable_targets: list[str] | None = None
    """Which `target_tag`s are trained; the others are answered by the helper model. None or []: all are trained."""

    def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput | Awaitable[WorkflowOutput]:
        """Work on the task with models from `tuner`, and return the result.

        `async def` or plain `def`: a plain one is called while no event loop is running in its thread, so that it may
        start one itself (`asyncio.run`). Blocking calls are fine in both: each episode has its own thread or process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def execute(self, workflow_task, tuner)`")

    def model_post_init(self, _context: Any) -> None:
        if not self.name:
            self.name = type(self).__name__
