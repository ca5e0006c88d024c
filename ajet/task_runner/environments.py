"""What a run's config asks for around an episode: its workflow's class, its environment and its sandbox."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.config import Config
from ajet.config.rollout import EnvironmentConfig
from ajet.environment.environment import (
    EnvironmentSettings,
    EnvironmentSource,
    find_source,
    observation_messages,
    observation_text,
    observed,
)
from ajet.environment.leased import LeasedEnvironment
from ajet.environment.sandboxes import SandboxError, SandboxSettings, check_sandbox, of_task, open_sandbox
from ajet.schema.errors import ImportPathError
from ajet.schema.task import WorkflowTask
from ajet.schema.user_code import check_method, find_named, import_class, looked_in
from ajet.task_runner.workflow import Workflow

if TYPE_CHECKING:
    from ajet.environment.sandboxes import Sandbox

log = logging.getLogger(__name__)

SERVICE_KEY = "ajet.task_reader.env_service.env_url"
UNASKED = ("", "[not defined]")
"""The placeholder query of a task that only the environment knows."""
ENDING_S = 2.5
"""How long the end of a run waits for environments to close. It is shorter than the time limit for stopping."""


def environment_settings(config: Config) -> EnvironmentSettings | None:
    """The environment that the config names: `rollout.environment`, or else the service that `task_reader` names."""
    world, reader = config.ajet.rollout.environment or EnvironmentConfig(), config.ajet.task_reader
    if world.source is not None or world.url is not None:
        return EnvironmentSettings(
            world.source, world.url, world.protocol, world.env_type, world.api_key, dict(world.options), world.timeout
        )
    if reader.type == "env_service" or ("->" in reader.type and reader.env_service.env_url):
        service = reader.env_service
        env_type = world.env_type if world.env_type != "default" else service.env_type or "default"
        api_key = world.api_key or service.api_key
        return EnvironmentSettings(
            None, service.env_url, world.protocol, env_type, api_key, dict(world.options), world.timeout, SERVICE_KEY
        )
    return None


def find_environment(config: Config) -> EnvironmentSource | None:
    """The source of the episodes' environments; None if they have none. Raises a `UserError`."""
    settings = environment_settings(config)
    return None if settings is None else find_source(settings, config.base_dirs)


def enter(leased: LeasedEnvironment, workflow_task: WorkflowTask) -> None:
    """Open the environment, and make it available to the workflow. Its first observation is the prompt of a task
    without messages."""
    leased.open()
    workflow_task.gym_env = leased
    task = workflow_task.task
    more: dict[str, object] = {}
    messages = observation_messages(observed(leased.observation))
    if not task.init_messages:
        more["init_messages"] = messages
    if task.main_query in UNASKED:
        more["main_query"] = observation_text(messages[-1]) if messages else ""
    workflow_task.task = task.model_copy(update=more)


class EnvironmentEndings:
    """Closes environments in the background, and waits for them when the run stops."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def end(self, close: Callable[[], None]) -> None:
        """Call `close` on another thread."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=close, name="ajet-environment-end", daemon=True)
        self._threads.add(thread)
        thread.start()

    async def wait(self) -> None:
        """Wait for all of them, up to `ENDING_S`."""
        until = asyncio.get_running_loop().time() + ENDING_S
        while any(thread.is_alive() for thread in self._threads):
            if asyncio.get_running_loop().time() > until:
                log.warning("some environments have not ended; those of a service will expire there")
                return
            await asyncio.sleep(0.02)


EXEC_S = SandboxSettings().exec_seconds
BEYOND_THE_EPISODE_S = 60.0
"""How much longer than its episode a sandbox may live. The episode destroys it; this limit is the last resort."""


def sandbox_settings(config: Config) -> SandboxSettings | None:
    """The settings of `rollout.sandbox`. None: episodes have no sandbox. Raises `SandboxError`."""
    asked = config.ajet.rollout.sandbox
    if asked is None:
        return None
    episode_s = config.ajet.rollout.episode_timeout
    agent = config.ajet.rollout.agent
    program = agent is not None and agent.type == "cli"
    shown = [_found(folder, config.base_dirs) for folder in asked.read_only]
    if agent is not None and agent.installed_in is not None and asked.kind == "bubblewrap":
        shown.append(_found(agent.installed_in, config.base_dirs, "ajet.rollout.agent.installed_in"))
    return SandboxSettings(
        kind=asked.kind,
        network=asked.network or ("host" if asked.kind == "none" else "gateway" if program else "none"),
        cpus=asked.cpus,
        memory_mb=asked.memory_mb,
        processes=asked.processes,
        disk_mb=asked.disk_mb,
        exec_seconds=asked.exec_seconds or (episode_s if program else EXEC_S),
        lifetime_seconds=asked.lifetime_seconds or episode_s + BEYOND_THE_EPISODE_S,
        image=asked.image,
        read_only=tuple(dict.fromkeys(shown)),
        environment=dict(asked.environment),
        options=dict(asked.options),
    )


def find_sandbox(config: Config) -> SandboxSettings | None:
    """The same, and raises `SandboxError` if this machine can't make it."""
    settings = sandbox_settings(config)
    if settings is not None:
        try:
            check_sandbox(settings)
        except SandboxError as error:
            raise SandboxError(f"ajet.rollout.sandbox: {error}") from error
        if config.ajet.rollout.agent is not None:
            from ajet.task_runner.agent_workflow import check_program

            check_program(config, settings)
    return settings


def _found(folder: str, base_dirs: Sequence[Path], key: str = "ajet.rollout.sandbox.read_only") -> str:
    given = Path(folder).expanduser()
    if given.is_absolute():
        return str(given)
    if (found := find_named(given, base_dirs, Path.is_dir)) is not None:
        return str(found)
    raise SandboxError(f"{key}: there is no folder {folder!r}; looked in {looked_in(given, base_dirs)}")


class LeasedSandbox:
    """One episode's sandbox. `kill` can be called from any thread, at any time."""

    def __init__(self, settings: SandboxSettings, metadata: Mapping[str, Any]) -> None:
        """`metadata`: the task's, for `of_task`."""
        self._settings = settings
        self._metadata = metadata
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()
        self._over = False

    async def open(self, tuner: Any) -> None:
        """Create it, and make it available to the workflow as `tuner.sandbox`."""
        gateway_url = None
        if self._settings.network == "gateway":
            gateway_url = tuner.as_oai_baseurl_apikey().base_url
        sandbox = await open_sandbox(of_task(self._settings, self._metadata), gateway_url)
        with self._lock:
            self._sandbox = sandbox
            over = self._over
        if over:  # the episode ended meanwhile
            await self.close()
            raise SandboxError("the episode is over")
        tuner.sandbox = sandbox

    async def close(self) -> None:
        with self._lock:
            self._over = True
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def kill(self) -> None:
        """Destroy it, even while the workflow uses it."""
        with self._lock:
            self._over = True
            sandbox = self._sandbox
        if sandbox is not None:
            sandbox.kill()


WORKFLOW_KEY = "ajet.rollout.user_workflow"


def load_workflow(config: Config) -> type[Workflow]:
    """The class that `rollout.user_workflow` names, or one that runs `rollout.agent`. Raises a `UserError`."""
    rollout = config.ajet.rollout
    if rollout.agent is None:
        named = rollout.user_workflow or ""
        workflow_class = import_class(named, Workflow, key=WORKFLOW_KEY, base_dirs=config.base_dirs)
        check_method(workflow_class, Workflow, "async def execute(self, workflow_task, tuner)", WORKFLOW_KEY)
        try:
            inspect.signature(workflow_class).bind(name="")
        except TypeError as error:
            raise ImportPathError(
                f"{WORKFLOW_KEY}: each episode makes a {workflow_class.__name__}(name=…), which fails: {error}\n"
                "    give its fields defaults, and let its `__init__`, if it has one, take `**fields`"
            ) from None
        return workflow_class
    from ajet.task_runner.agent_workflow import build_agent, build_cli_agent, workflow_of

    return workflow_of((build_cli_agent if rollout.agent.type == "cli" else build_agent)(config))
