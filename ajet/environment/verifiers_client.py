"""`VerifiersHost`: a process that plays tasks of an environment of the package verifiers, in an environment of its own.

verifiers plays an episode itself: it brings the agent's program, the tools and the reward. We only give it an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError, EnvironmentFault, EnvironmentUnavailableError
from ajet.system.interpreter_host import START_S, InterpreterHost

HOST = Path(__file__).with_name("verifiers_host.py")
KEY = "ajet.task_reader.options"
KNOWN = ("env", "python", "num_tasks", "num_validation_tasks")
NO_PACKAGE = "No module named 'verifiers'"


class VerifiersHost(InterpreterHost):
    """One process. Any thread may ask it."""

    package = "verifiers"
    fault = EnvironmentFault
    gone = EnvironmentUnavailableError

    def __init__(self, env: Mapping[str, Any], python: str | None = None) -> None:
        """`env`: verifiers' config of an environment (`{"taskset": {"id": …}}`); `python`: the interpreter with it."""
        super().__init__(HOST, [json.dumps(env)], python or sys.executable, f"{KEY}.python")

    def ready(self) -> None:
        """Wait until it has loaded the environment. Raises ConfigError."""
        try:
            self.started()
        except EnvironmentFault as error:
            self.close()
            what = "'verifiers>=0.4'" if NO_PACKAGE in str(error) else "the environment's package"
            raise ConfigError(
                f"{KEY}: verifiers can't load this environment with {self.interpreter}: {error}\n"
                f"    {self.interpreter} -m pip install {what}, or name another interpreter in options.python"
            ) from None
        except TimeoutError:
            self.close()
            raise ConfigError(f"{KEY}: verifiers did not load this environment within {START_S:g} s") from None

    def tasks(self, limit: int) -> list[dict[str, Any]]:
        """The first tasks: `index` and `query`."""
        tasks: list[dict[str, Any]] = self.ask("tasks", limit=limit)[1].result()
        return tasks

    async def play(self, index: int, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Play one episode. Cancelling the wait ends it."""
        number, answer = self.ask("run", index=index, base_url=base_url, api_key=api_key, model=model)
        try:
            played: dict[str, Any] = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.cancel(number)
            raise
        return played


def host_options(options: Any) -> tuple[dict[str, Any], str | None]:
    """The environment's config and the interpreter, checked."""
    unknown = [name for name in options if name not in KNOWN]
    if unknown:
        raise ConfigError(f"{KEY}.{unknown[0]}: unknown option; there are {', '.join(KNOWN)}")
    env = options.get("env")
    if not isinstance(env, dict) or not isinstance(env.get("taskset"), dict) or not env["taskset"].get("id"):
        raise ConfigError(f"{KEY}.env: name the environment's tasks: `env: {{taskset: {{id: gsm8k}}}}`")
    return env, options.get("python")
