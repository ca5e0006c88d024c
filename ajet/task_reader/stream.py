"""`TaskStream`: yields training tasks in order, and can resume from a position.

`Curriculum` chooses tasks by their recent solve rate, as groups that always or never succeed carry no signal. A task's
weight is 4·p·(1 − p), with p its recent solve rate; a task that was never tried has weight 1. Each task of a batch is
drawn with probability (1 − explore) · weight / sum of weights + explore / number of tasks, without replacement.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ajet.schema.task import Task

log = logging.getLogger("ajet.task_reader")


class TaskStream:
    """An endless stream of batches of `batch_size` tasks. Each epoch is shuffled by (seed, epoch). A batch may span two
    epochs, so no task is left out. The position counts tasks, so a run may resume with another batch size.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, batch_size: int, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError("a stream needs at least one task")
        self.tasks = list(tasks)
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.position = 0
        """How many tasks have been handed out so far."""
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
        """How many epochs have been handed out so far, as a fraction."""
        return self.position / len(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint stores."""
        return {"position": self.position, "seed": self.seed, "tasks": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream stopped."""
        if state["tasks"] != self._fingerprint() or state["seed"] != self.seed:
            log.warning(
                "the training tasks or ajet.task_reader.seed changed since the checkpoint: the task order is new"
            )
        self.position = int(state["position"])

    def occurrence_at(self, position: int) -> int:
        """How many groups of the same task precede this one in its batch. Each group samples different replies."""
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


class Curriculum(TaskStream):
    """A stream that records how its tasks ended. Its choice depends on the seed, the position and the solve rates."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, batch_size: int, explore: float, memory: float) -> None:
        super().__init__(tasks, seed=seed, batch_size=batch_size)
        self.explore = explore
        self.memory = memory
        self._record: dict[str, tuple[float, float]] = {}
        """By task id: successes and tries. Both decay by the factor `memory` whenever new ones are added."""

    def note(self, task_id: str, successes: int, tries: int) -> None:
        """Record the results of a task's episodes."""
        if tries:
            earlier, tried = self._record.get(task_id, (0.0, 0.0))
            self._record[task_id] = (self.memory * earlier + successes, self.memory * tried + tries)

    def solve_rate(self, task_id: str) -> float | None:
        """The task's recent solve rate; None if it was never tried."""
        found = self._record.get(task_id)
        return None if found is None else found[0] / found[1]

    def probabilities(self) -> list[float]:
        """The probability of each task, in the order of `tasks`, to be the first of the next batch."""
        rates = [self.solve_rate(task.task_id) for task in self.tasks]
        weights = [1.0 if rate is None else 4.0 * rate * (1.0 - rate) for rate in rates]
        total = sum(weights)
        if total == 0.0:  # every task is always or never solved
            return [1.0 / len(rates)] * len(rates)
        return [(1.0 - self.explore) * weight / total + self.explore / len(rates) for weight in weights]

    def next_batch(self) -> list[Task]:
        """The next `batch_size` tasks. No task occurs twice before all have occurred once."""
        rng = random.Random(f"{self.seed}:curriculum:{self.position}")
        probabilities = self.probabilities()
        batch: list[Task] = []
        while len(batch) < self.batch_size:
            # the first to ring, if each task's clock rings at the rate of its probability
            rings = [-math.log(1.0 - rng.random()) / p if p else math.inf for p in probabilities]
            order = sorted(range(len(self.tasks)), key=lambda index: (rings[index], index))
            batch += [self.tasks[index] for index in order[: self.batch_size - len(batch)]]
        self.position += self.batch_size
        return batch

    def metrics(self) -> dict[str, float]:
        """Metrics of the run's progress on its tasks."""
        known = [rate for task in self.tasks if (rate := self.solve_rate(task.task_id)) is not None]
        count = len(self.tasks)
        return {
            "curriculum/tried": len(known) / count,
            "curriculum/always_solved": sum(rate == 1.0 for rate in known) / count,
            "curriculum/never_solved": sum(rate == 0.0 for rate in known) / count,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"solved": {name: list(record) for name, record in self._record.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume. A run without a curriculum has no record; records of removed tasks are dropped."""
        super().load_state_dict(state)
        present = {task.task_id for task in self.tasks}
        stored = state.get("solved", {})
        self._record = {name: (record[0], record[1]) for name, record in stored.items() if name in present}
