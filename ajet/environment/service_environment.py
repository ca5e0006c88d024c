"""`ServiceEnvironment`: an environment behind the environment-service protocol. One instance there is one episode."""

from __future__ import annotations

import logging
from typing import Any

from ajet.environment.environment import Action, Environment, Observation, StepResult
from ajet.environment.service_client import ServiceClient
from ajet.environment.source import EnvironmentSettings
from ajet.environment.texts import NOTHING_OBSERVED, action_message
from ajet.schema.task import Task

log = logging.getLogger(__name__)


class ServiceSource:
    """Environments of one service."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        assert settings.url is not None
        self._settings = settings
        self.url: str = settings.url

    @property
    def name(self) -> str:
        return self.url

    def make(self, episode_id: str) -> ServiceEnvironment:
        settings = self._settings
        return ServiceEnvironment(self._client(), episode_id, settings.env_type, dict(settings.options))

    def abandon(self, episode_id: str) -> None:
        client = self._client()
        if why := client.release(episode_id):
            log.debug("releasing %s: %s", episode_id, why)
        client.close()

    def task_ids(self, split: str) -> list[str]:
        client = self._client()
        try:
            return client.profile(self._settings.env_type, split)
        finally:
            client.close()

    def _client(self) -> ServiceClient:
        return ServiceClient(self.url, self._settings.api_key, self._settings.timeout_s)


class ServiceEnvironment(Environment):
    """One instance of a service, under the episode's id."""

    def __init__(self, client: ServiceClient, instance_id: str, env_type: str, options: dict[str, Any]) -> None:
        self._client = client
        self._instance_id = instance_id
        self._env_type = env_type
        self._options = options
        self._created = False
        self.evaluation_params: dict[str, Any] = {"sparse": False}

    def reset(self, task: Task) -> Observation:
        if self._created:
            self._client.release(self._instance_id)
        self._created = True  # from here on it may exist, whatever the answer
        params = dict(self._options)
        if task.main_query:
            params.setdefault("main_query", task.main_query)
        if task.metadata:
            params.setdefault("metadata", task.metadata)
        env_type = task.env_type or self._env_type
        instance = self._client.create(env_type, task.task_id, self._instance_id, params)
        return instance.state or NOTHING_OBSERVED

    def step(self, action: Action) -> StepResult:
        return self._client.step(self._instance_id, action_message(action))

    def evaluate(self) -> float:
        return self._client.evaluate(self._instance_id, self.evaluation_params)

    def get_info(self) -> Any:
        return self._client.info(self._instance_id)

    def close(self) -> None:
        """Over a connection of its own: this may be another thread than the one that waits for a step."""
        if not self._created:
            return
        other = self._client.twin()
        try:
            if why := other.release(self._instance_id):
                log.info("instance %s was not released (it will expire): %s", self._instance_id, why)
        finally:
            other.close()
