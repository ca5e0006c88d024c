"""`ServiceEnvironment`: an environment behind the environment-service protocol. One instance there is one episode."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ajet.environment.environment import Action, Environment, Observation, StepResult
from ajet.environment.service_client import ServiceClient
from ajet.environment.source import EnvironmentSettings
from ajet.environment.texts import NOTHING_OBSERVED, action_message
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError
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
        self.tools = described_tools(instance.info.get("tools"))
        return instance.state or NOTHING_OBSERVED

    def step(self, action: Action) -> StepResult:
        return self._client.step(self._instance_id, action_message(action))

    def evaluate(self) -> float:
        return self._client.evaluate(self._instance_id, self.evaluation_params)

    def get_info(self) -> Any:
        return self._client.info(self._instance_id)

    def ask_for_tools(self) -> Sequence[Mapping[str, Any]]:
        """By `/get_info`, whose answer may be anything: only schemas count. A service without it offers none."""
        try:
            told = self._client.info(self._instance_id)
        except EnvironmentUnavailableError:
            raise
        except EnvironmentFault as error:
            log.info("%s names no tools: %s", self._client.url, error)
            return ()
        return described_tools(told)

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


def described_tools(told: Any) -> Sequence[Mapping[str, Any]]:
    """The tools in what a service told: a list of schemas in OpenAI's form, or an object with such a list as `tools`.
    Documentation in words is no tool."""
    listed = told.get("tools") if isinstance(told, Mapping) else told
    if not isinstance(listed, list):
        return ()
    return tuple(each for each in listed if isinstance(each, Mapping) and ("function" in each or "name" in each))
