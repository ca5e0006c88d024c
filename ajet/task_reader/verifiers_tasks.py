"""`VerifiersReader`: the tasks of an installed environment of the package verifiers.

task_reader:
  type: ajet.task_reader.verifiers_tasks->VerifiersReader
  options: {env: {taskset: {id: gsm8k}}, python: /opt/verifiers/bin/python, num_tasks: 500, num_validation_tasks: 50}
"""

from __future__ import annotations

from ajet.environment.verifiers_client import KEY, VerifiersHost, host_options
from ajet.schema.errors import ConfigError, TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader


class VerifiersReader(BaseTaskReader):
    """The first `num_validation_tasks` (0) tasks are for validation, the next `num_tasks` (1000) for training."""

    def get_training_tasks(self) -> list[Task]:
        first, count = self._count("num_validation_tasks", 0), self._count("num_tasks", 1000)
        tasks = self._first(first + count)[first:]
        if not tasks:
            raise TaskDataError(f"{KEY}: this environment has no more than {first} tasks, all for validation")
        return tasks

    def get_validation_tasks(self) -> list[Task]:
        count = self._count("num_validation_tasks", 0)
        return self._first(count) if count else []

    def _first(self, count: int) -> list[Task]:
        env, python = host_options(self.reader_config.options)
        return [
            Task(main_query=task["query"], task_id=f"verifiers-{task['index']}", metadata={"index": task["index"]})
            for task in VerifiersHost.shared(env, python).tasks(count)
        ]

    def _count(self, name: str, default: int) -> int:
        value = self.reader_config.options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{KEY}.{name} should be a whole number from 0, not {value!r}")
        return value
