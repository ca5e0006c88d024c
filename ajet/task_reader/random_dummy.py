"""`random_dummy`: random sums, to try a workflow without data."""

from __future__ import annotations

import random

from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

VALIDATION_OFFSET = 1_000_000
"""The seed offset of validation tasks, so that they differ from training tasks however many there are."""


class RandomDummyReader(BaseTaskReader):
    """`random_dummy.num_tasks` sums, the same for the same `task_reader.seed`. `metadata.random_number` is the task's
    index, which workflows can use as a random seed."""

    def get_training_tasks(self) -> list[Task]:
        return [self._task("train", index, 0) for index in range(self.reader_config.random_dummy.num_tasks)]

    def get_validation_tasks(self) -> list[Task]:
        count = self.reader_config.random_dummy.num_validation_tasks
        return [self._task("val", index, VALIDATION_OFFSET) for index in range(count)]

    def _task(self, split: str, index: int, offset: int) -> Task:
        draw = random.Random(f"{self.reader_config.seed}:{offset + index}")
        left, right = draw.randint(1, 99), draw.randint(1, 99)
        return Task(
            main_query=f"What is {left} + {right}?",
            task_id=f"dummy-{split}-{index}",
            metadata={"answer": str(left + right), "random_number": index},
        )
