"""What goes into an episode, and what the user's workflow returns."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Task(BaseModel):
    """One problem, as a task reader delivers it."""

    main_query: str = ""
    init_messages: list[dict[str, Any]] = Field(default_factory=list)
    task_id: str = ""
    env_type: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class WorkflowTask(BaseModel):
    """What a workflow is given: the task and the episode's place in the batch."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    task: Task
    task_id: str = ""
    env_type: str = ""
    episode_uuid: str = ""
    task_batch_index: int = 0
    """Which task of the batch."""
    task_thread_index: int = 0
    """Which repeat of that task (0 … num_repeat-1)."""
    task_tag: str = ""
    """A label for per-tag metrics, taken from the task's metadata (`tag`)."""
    gym_env: Any = None


class WorkflowOutput(BaseModel):
    """What a workflow returns. `reward=None` asks the judge; a list holds one reward per model call."""

    reward: float | list[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    log_metrics: dict[str, Any] = Field(default_factory=dict)
