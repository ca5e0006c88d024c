"""`split_tasks`: which tasks are searched with, which validate candidates, and which confirm the winner."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet.schema.errors import ConfigError
from ajet.schema.task import Task

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger("ajet.backbone.prompt")


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """By a name that is unique in the run: the task's id."""

    search: dict[str, Task]
    validation: dict[str, Task]
    confirmation: dict[str, Task]

    @property
    def all(self) -> dict[str, Task]:
        return {**self.search, **self.validation, **self.confirmation}


def split_tasks(config: Config, training: Sequence[Task], validation: Sequence[Task]) -> TaskSplit:
    """Search with the training split; validate and confirm with the validation split. Without one, the training tasks
    are divided: half, a quarter, a quarter. Confirmation tasks that occur elsewhere are left out."""
    tuning = config.ajet.prompt_tuning
    shuffle = random.Random(config.ajet.task_reader.seed).shuffle
    searched, rest = list(training), list(validation)
    if not rest:
        shuffle(searched)
        half = (len(searched) + 1) // 2
        searched, rest = searched[:half], searched[half:]
    else:
        shuffle(rest)
    if not searched or not rest:
        raise ConfigError(
            f"ajet.task_reader: {len(training)} training and {len(validation)} validation tasks are too few: "
            "candidates are written from some tasks and compared on others, so at least 2 are needed"
        )
    kept = len(rest) // 2 if tuning.confirmation_tasks is None else tuning.confirmation_tasks
    if kept >= len(rest):
        raise ConfigError(
            f"ajet.prompt_tuning.confirmation_tasks: {kept} of {len(rest)} tasks would be kept, and none is left to "
            f"validate candidates: write at most {len(rest) - 1}"
        )
    validating, confirming = rest[: len(rest) - kept], rest[len(rest) - kept :]
    if tuning.validation_tasks is not None:
        validating = validating[: tuning.validation_tasks]
    seen = {_content(task) for task in (*searched, *validating)}
    unseen = [task for task in confirming if _content(task) not in seen]
    if len(unseen) < len(confirming):
        log.warning(
            "%d of %d confirmation tasks also occur among the others, and are left out",
            *(len(confirming) - len(unseen), len(confirming)),
        )
    names: set[str] = set()
    return TaskSplit(_named(searched, names), _named(validating, names), _named(unseen, names))


def _named(tasks: Sequence[Task], taken: set[str]) -> dict[str, Task]:
    named = {}
    for task in tasks:
        name, number = task.task_id, 1
        while name in taken:
            number += 1
            name = f"{task.task_id}~{number}"
        taken.add(name)
        named[name] = task
    return named


def _content(task: Task) -> str:
    return json.dumps([task.main_query, task.init_messages, task.metadata], sort_keys=True, default=str)
