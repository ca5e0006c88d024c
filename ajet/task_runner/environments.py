"""The environments of a run's episodes, as its config names them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.environment.environment import (
    EnvironmentSettings,
    EnvironmentSource,
    find_source,
    observation_messages,
    observation_text,
)
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.task import Task, WorkflowTask

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)

UNASKED = ("", "[not defined]")
"""What stands for the query of a task that only the environment knows."""
ENDING_S = 2.5
"""How long the end of a run waits for environments that are being closed: less than stopping may take."""


def environment_settings(config: Config) -> EnvironmentSettings | None:
    """What the config says about environments: `rollout.environment`, or else the service that the tasks are from."""
    world = config.ajet.rollout.environment
    if world is not None:
        return EnvironmentSettings(
            world.source, world.url, world.protocol, world.env_type, world.api_key, dict(world.options), world.timeout
        )
    if config.ajet.task_reader.type == "env_service":
        service = config.ajet.task_reader.env_service
        key = "ajet.task_reader.env_service.env_url"
        env_type = service.env_type or "default"
        return EnvironmentSettings(url=service.env_url, env_type=env_type, api_key=service.api_key, key=key)
    return None


def find_environment(config: Config, base_dirs: Sequence[Path] = ()) -> EnvironmentSource | None:
    """Where the episodes' environments come from; None if they have none. Raises a `UserError`."""
    settings = environment_settings(config)
    return None if settings is None else find_source(settings, base_dirs)


def enter(leased: LeasedEnvironment, workflow_task: WorkflowTask) -> None:
    """Open the environment, and show it to the workflow. Its first observation begins a task that has no messages."""
    leased.open()
    workflow_task.gym_env = leased
    task = workflow_task.task
    more: dict[str, object] = {}
    if not task.init_messages:
        more["init_messages"] = observation_messages(leased.observation)
    if task.main_query in UNASKED:
        messages = observation_messages(leased.observation)
        more["main_query"] = observation_text(messages[-1]) if messages else ""
    if more:
        workflow_task.task = Task.model_validate({**task.model_dump(), **more})  # the group's others share the old one


class EnvironmentEndings:
    """Ends environments on threads of their own, and waits for them when the run stops."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def end(self, close: Callable[[], None]) -> None:
        """Call `close` soon, in another thread."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=close, name="ajet-environment-end", daemon=True)
        self._threads.add(thread)
        thread.start()

    async def wait(self) -> None:
        """Wait for all of them, but not for ever."""
        until = asyncio.get_running_loop().time() + ENDING_S
        while any(thread.is_alive() for thread in self._threads):
            if asyncio.get_running_loop().time() > until:
                log.warning("some environments have not ended; those of a service will expire there")
                return
            await asyncio.sleep(0.02)
