"""`ajet runner --with-ray N`: N runners as actors of a Ray cluster. Ray places them, and replaces those of a lost node.

No code is sent: each actor starts an ordinary `ajet runner` in this folder, which every node must have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ajet.backbone.ray.address import checked_address
from ajet.cli.runner import KEY_VARIABLE, RESTART_S
from ajet.schema.errors import MissingDependencyError, UserError
from ajet.system.parent import ending_with_us

LOOK_S = 0.5
"""How often it is looked whether somebody wants the runners to stop."""
ANSWER_S = 10.0
"""How long an actor may take to answer. One that doesn't has found no room yet, or its node is gone."""


class _RunnerActor:
    """One runner, wherever Ray has put it."""

    def __init__(self, arguments: Sequence[str], folder: str, key: str) -> None:
        self._arguments = arguments
        self._folder = folder
        self._key = key
        self._program: subprocess.Popen[bytes] | None = None
        self._draining = threading.Event()

    def run(self) -> int:
        """Until the runner ends; one that is killed is started anew. Its exit code."""
        # it drains, too, when this actor's process is killed
        command = ending_with_us([sys.executable, "-m", "ajet", "runner", *self._arguments])
        environment = {**os.environ, KEY_VARIABLE: self._key}
        while not self._draining.is_set():
            self._program = subprocess.Popen(command, cwd=self._folder, env=environment)
            if self._draining.is_set():  # asked while it was being started
                self._program.terminate()
            code = self._program.wait()
            if code >= 0:
                return code
            self._draining.wait(RESTART_S)
        return 0

    def drain(self) -> None:
        """Let it finish what it has begun."""
        self._draining.set()
        if self._program is not None:
            self._program.terminate()


def place(arguments: Namespace, key: str) -> int:
    """Start the runners, and wait until all have ended. Ctrl-C and SIGTERM drain them."""
    try:
        import ray
    except ImportError:
        raise MissingDependencyError("--with-ray needs Ray: pip install ray, the version of the cluster") from None
    address = checked_address(arguments.ray_address)
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--with-ray: no Ray cluster: {error}\n    name one with --ray-address HOST:PORT or RAY_ADDRESS (and its "
            "RAY_AUTH_TOKEN, if it has one), or start one with `ray start --head`"
        ) from None
    count: int = arguments.with_ray
    wanted, there = count * arguments.workers, int(ray.cluster_resources().get("CPU", 0))
    if wanted > there:
        print(f"{count} runners ask for {wanted} CPUs, the cluster has {there}: some wait for room", file=sys.stderr)
    options = {"num_cpus": arguments.workers, "max_concurrency": 2, "max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(**options, scheduling_strategy="SPREAD")(_RunnerActor)
    actors = [actor.remote(_of_one(arguments, number), os.getcwd(), key) for number in range(count)]
    print(f"{count} runners on Ray for {arguments.connect} (Ctrl-C: finish and stop)", flush=True)
    try:
        return _wait(ray, actors)
    finally:
        ray.shutdown()


def _of_one(arguments: Namespace, number: int) -> list[str]:
    """The command line of one runner."""
    line = ["--connect", arguments.connect, "--workflow", arguments.workflow, "--workers", str(arguments.workers)]
    line += ["--name", f"{arguments.name}-{number}", "--patience", arguments.patience]
    return line + (["--ca", arguments.ca] if arguments.ca else [])


def _wait(ray: Any, actors: Sequence[Any]) -> int:
    """Returns the highest exit code."""
    asked = 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    running = {actor.run.remote(): actor for actor in actors}
    draining, code = False, 0
    while running:
        ended, _ = ray.wait(list(running), timeout=LOOK_S)
        for one in ended:
            del running[one]
            try:
                code = max(code, ray.get(one))
            except ray.exceptions.RayError as error:
                print(f"a runner was lost: {error}", file=sys.stderr, flush=True)
                code = max(code, 1)
        if asked and not draining:
            draining = True
            for one in _drain(ray, running):
                del running[one]
    return code


def _drain(ray: Any, running: Mapping[Any, Any]) -> list[Any]:
    """Ask all runners to finish. Returns those that there is no need to wait for: they never began."""
    answers = {actor.drain.remote(): one for one, actor in running.items()}
    _, silent = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_S)
    for answer in silent:
        ray.kill(running[answers[answer]])
    return [answers[answer] for answer in silent]
