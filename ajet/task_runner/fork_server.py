"""The fork server: imports the user's code once, then forks a worker for each attempt (see `ajet.system.forking`).

A worker's two descriptors are its channel and its standard error; `dump` has it print its stack. The only user code
that runs here is its import.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

from ajet.config import Config
from ajet.schema.user_code import import_class
from ajet.system.forking import ForkingServer, serve
from ajet.task_judge.base_judge import JUDGE_KEY, BaseJudge
from ajet.task_runner.agent_workflow import load_workflow
from ajet.task_runner.environments import find_environment, find_sandbox
from ajet.task_runner.tuner.clients import rehearse
from ajet.task_runner.worker import run_worker


def main(control_fd: int) -> None:
    """Serve until the control socket closes."""
    serve(control_fd, ForkServer)


class ForkServer(ForkingServer):
    """The server, with the user's code imported."""

    descriptors = 2
    threads_warning = "importing the workflow started threads ({names}); they do not run in its workers"

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(control)
        self._config = Config.model_validate(setup["config"])
        self._base_dirs = [Path(folder) for folder in setup["base_dirs"]]
        self._workflow_class = load_workflow(self._config, self._base_dirs)
        judge = self._config.ajet.task_judge.judge_protocol
        if judge is not None:
            import_class(judge, BaseJudge, key=JUDGE_KEY, base_dirs=self._base_dirs)
        self._environments = find_environment(self._config, self._base_dirs)
        self._sandboxes = find_sandbox(self._config, self._base_dirs)
        rehearse()

    def command(self, do: str, process: int) -> None:
        os.kill(process, signal.SIGUSR1)  # `dump`: faulthandler prints its stack

    def child(self, *descriptors: int) -> int:
        channel, stderr = descriptors
        run_worker(
            self._config,
            self._workflow_class,
            self._environments,
            self._sandboxes,
            self._base_dirs,
            socket.socket(fileno=channel),
            stderr,
        )
        return 1  # it ends the process itself
