"""`TaskStream`: the training tasks in the order of training, with a position to resume from."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ajet.schema.task import Task

log = logging.getLogger("ajet.task_reader")


class TaskStream:
    """Endless batches of `batch_size` tasks. Each epoch has its own order, drawn from (seed, epoch).

    A batch may span the end of an epoch, so no task is left out. The position counts tasks, so a run may resume with
    another batch size.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, batch_size: int, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError("a stream needs at least one task")
        self.tasks = list(tasks)
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.position = 0
        """How many tasks were handed out so far."""
        self._order: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[list[Task]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[Task]:
        """The next `batch_size` tasks."""
        batch = [self.task_at(self.position + offset) for offset in range(self.batch_size)]
        self.position += self.batch_size
        return batch

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, including the fraction."""
        return self.position / len(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"position": self.position, "seed": self.seed, "tasks": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream stopped."""
        if state["tasks"] != self._fingerprint() or state["seed"] != self.seed:
            log.warning(
                "the training tasks or ajet.task_reader.seed changed since the checkpoint: the task order is new"
            )
        self.position = int(state["position"])

    def occurrence_at(self, position: int) -> int:
        """How many groups of the same task come before it in its batch. Each of them draws replies of its own."""
        begin = position - position % self.batch_size
        mine = self.task_at(position).task_id
        return sum(self.task_at(earlier).task_id == mine for earlier in range(begin, position))

    def task_at(self, position: int) -> Task:
        """The task at a position of the endless stream."""
        epoch, index = divmod(position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            if self.shuffle:
                # seeded with text: the order is then the same in every Python version and process
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.tasks[self._order[1][index]]

    def _fingerprint(self) -> str:
        ids = "\n".join(task.task_id for task in self.tasks)
        return hashlib.sha256(ids.encode(errors="surrogatepass")).hexdigest()[:16]
