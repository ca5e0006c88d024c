"""Where tasks come from. One file a source; `registry.py` knows them all."""

from __future__ import annotations

from ajet.task_reader.registry import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_reader.stream import TaskStream
from ajet.task_reader.task_reader_base import BaseTaskReader

__all__ = ["BaseTaskReader", "TaskStream", "build_reader", "read_training_tasks", "read_validation_tasks"]
