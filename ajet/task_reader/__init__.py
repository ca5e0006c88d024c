"""Where tasks come from. One module per source; `ajet.config.kinds` lists them."""

from __future__ import annotations

from ajet.task_reader.task_reader_base import (
    BaseTaskReader,
    TaskStream,
    build_reader,
    read_training_tasks,
    read_validation_tasks,
)

__all__ = ["BaseTaskReader", "TaskStream", "build_reader", "read_training_tasks", "read_validation_tasks"]
