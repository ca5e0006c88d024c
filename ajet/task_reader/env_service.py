"""`env_service`: the tasks that an environment service offers. Only the service knows their content."""

from __future__ import annotations

from ajet.environment.environment import check_address
from ajet.environment.service_environment import ServiceClient
from ajet.schema.errors import EnvironmentFault, TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

KEY = "ajet.task_reader.env_service.env_url"
UNKNOWN_QUERY = "[not defined]"
"""A placeholder. The episode's environment replaces it with its first observation."""


class EnvServiceReader(BaseTaskReader):
    """One task per id of `env_service.training_split` and `validation_split`."""

    def get_training_tasks(self) -> list[Task]:
        return self._tasks(self.reader_config.env_service.training_split)

    def get_validation_tasks(self) -> list[Task]:
        return self._tasks(self.reader_config.env_service.validation_split)

    def _tasks(self, split: str) -> list[Task]:
        settings = self.reader_config.env_service
        check_address(settings.env_url, settings.api_key, KEY)
        try:
            ids = ServiceClient(settings.env_url, settings.api_key).profile(settings.env_type or "default", split)
        except EnvironmentFault as error:
            raise TaskDataError(f"{KEY}: {error}") from error
        if not ids:
            raise TaskDataError(
                f"ajet.task_reader.env_service: {settings.env_url} offers no tasks of env_type "
                f"{settings.env_type!r} in split {split!r}"
            )
        return [Task(main_query=UNKNOWN_QUERY, task_id=task_id, env_type=settings.env_type) for task_id in ids]
