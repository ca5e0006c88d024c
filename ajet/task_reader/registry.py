"""Makes the reader that a config names, and reads a run's tasks with it."""

from __future__ import annotations

import logging

from ajet.config import Config
from ajet.config.kinds import READERS, load
from ajet.schema.task import Task
from ajet.schema.user_code import import_class
from ajet.task_reader.task_reader_base import BaseTaskReader, require_tasks, with_unique_ids

log = logging.getLogger("ajet.task_reader")


def build_reader(config: Config) -> BaseTaskReader:
    """The reader named by `task_reader.type`, possibly the user's own."""
    kind = config.ajet.task_reader.type
    if kind in READERS:
        reader_class = load(READERS, kind)
    else:
        reader_class = import_class(kind, BaseTaskReader, key="ajet.task_reader.type", base_dirs=config.base_dirs)
    reader = reader_class(config.ajet.task_reader)
    assert isinstance(reader, BaseTaskReader)
    reader.config = config
    return reader


def read_training_tasks(reader: BaseTaskReader) -> list[Task]:
    """The training tasks in the source's order, each with a unique id."""
    return _checked(reader.get_training_tasks(), f"{type(reader).__name__}.get_training_tasks()", "training")


def read_validation_tasks(reader: BaseTaskReader) -> list[Task]:
    """The validation tasks in the source's order, each with a unique id."""
    return _checked(reader.get_validation_tasks(), f"{type(reader).__name__}.get_validation_tasks()", "validation")


def _checked(tasks: object, where: str, split: str) -> list[Task]:
    unique, note = with_unique_ids(require_tasks(tasks, where))
    if note:
        log.info("%s tasks: %s", split, note)
    return unique
