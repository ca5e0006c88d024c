"""`random_dummy`: random sums, to try a workflow without data."""

from __future__ import annotations

import random

import numpy

from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

ORDER_SEED = 42
"""AgentJet's, so that its workflows meet the same tasks in the same order."""


class RandomDummyReader(BaseTaskReader):
    """`random_dummy.num_tasks` sums, the same for the same `task_reader.seed`, in a fixed random order. A task's id and
    `metadata.random_number` are its number, which workflows can use as a random seed."""

    def get_training_tasks(self) -> list[Task]:
        return self._tasks(0, self.reader_config.random_dummy.num_tasks)

    def get_validation_tasks(self) -> list[Task]:
        section = self.reader_config.random_dummy
        if section.num_validation_tasks is None:
            return self.get_training_tasks()
        return self._tasks(section.num_tasks, section.num_validation_tasks)

    def _tasks(self, first: int, count: int) -> list[Task]:
        numbers = list(range(first, first + count))
        numpy.random.RandomState(ORDER_SEED).shuffle(numbers)
        return [self._task(number) for number in numbers]

    def _task(self, number: int) -> Task:
        draw = random.Random(f"{self.reader_config.seed}:{number}")
        left, right = draw.randint(1, 99), draw.randint(1, 99)
        return Task(
            main_query=f"What is {left} + {right}?",
            task_id=str(number),
            metadata={"answer": str(left + right), "random_number": number},
        )
