"""`ajet runner`: run episodes of a training run elsewhere, with this machine's workflow code.

It needs neither torch nor a GPU. Each worker is a process of its own, forked from the runner: one that crashes or hangs
is replaced at once. `--with-ray N` has Ray place N runners as actors on a cluster, and replace those of a lost node. No
code is sent: each actor starts an ordinary `ajet runner` in this folder, which every node must have.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ajet.backbone.ray import checked_address
from ajet.cli.store import seconds
from ajet.schema.errors import MissingDependencyError, UserError
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser, whole
from ajet.system.processes import ending_with_us

if TYPE_CHECKING:
    from ajet.task_runner.workflow import Workflow


KEY_VARIABLE = "AJET_RUNNER_KEY"
RESTART_S = 1.0
"""Pause before a crashed worker is replaced."""
WORKFLOW_FLAG = "--workflow"
AWAY, REFUSED = 76, 77
"""Exit codes of a worker whose run has gone away, or doesn't want it. Others are the workflow's doing."""


def run(argv: Sequence[str]) -> int:
    """Run episodes until Ctrl-C or SIGTERM, then finish those that have begun."""
    parser = CommandParser("ajet runner", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="URL", help="where the run serves its episodes")
    parser.add_argument(WORKFLOW_FLAG, required=True, metavar="FILE.py->CLASS", help="the workflow, on this machine")
    parser.add_argument("--workers", type=whole(1), default=1, help="episodes at a time (default: 1)")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="how the run calls this runner")
    parser.add_argument("--ca", metavar="FILE", help="PEM file with the authority of the run's certificate")
    away = "how long the run may be away (default: 10m)"
    parser.add_argument("--patience", type=seconds, default="10m", metavar="TIME", help=away)
    parser.add_argument("--with-ray", type=whole(1), metavar="N", help="N such runners as actors of a Ray cluster")
    parser.add_argument("--ray-address", metavar="ADDR", help="the cluster (default: RAY_ADDRESS, or this machine's)")
    arguments = parser.parse_args(argv)
    if arguments.ray_address and arguments.with_ray is None:
        parser.error("--ray-address goes with --with-ray")
    address = urlsplit(arguments.connect)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UserError(f"--connect: {arguments.connect!r} is not an address: it looks like http://host:port")
    if arguments.ca:
        _check_authority(arguments.ca)
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise UserError(
            f"{KEY_VARIABLE} is not set: the run prints it when it starts, or export the same on both sides"
        )
    if arguments.with_ray is not None:
        return place(arguments, key)
    return _Runner(arguments, key).run()


def _check_authority(file: str) -> None:
    """What the workers would meet later, each for itself."""
    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:  # also what ssl raises
        raise UserError(
            f"--ca {file}: {error.strerror or error}\n"
            "    give the PEM file of the authority that signed the run's certificate"
        ) from None


async def _work(arguments: Namespace, key: str, number: int, runner: int, workflow_class: type[Workflow]) -> int:
    """What a worker does."""
    from ajet.store.requests import KeyRefusedError, StoreUnavailableError
    from ajet.task_runner.remote import WorkerSettings, work

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        name = f"{arguments.name}-{number}"
        settings = WorkerSettings(arguments.connect, key, name, arguments.ca, arguments.patience, parent=runner)
        await work(settings, workflow_class, stop)
    except KeyRefusedError:
        print(
            f"error: {KEY_VARIABLE}: the run at {printable(arguments.connect)} refuses this key: export the same on "
            "both sides, or the one that the run prints",
            file=sys.stderr,
        )
        return REFUSED
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return AWAY if isinstance(error, StoreUnavailableError) else REFUSED
    return 0


class _Runner:
    """Imports the workflow, starts the workers, replaces those that end, and ends them all."""

    def __init__(self, arguments: Namespace, key: str) -> None:
        from ajet.schema.user_code import import_class
        from ajet.system.forking import ForkedWorkers
        from ajet.task_runner.tuner import rehearse
        from ajet.task_runner.workflow import Workflow

        rehearse()
        before = threading.active_count()
        workflow_class = import_class(arguments.workflow, Workflow, key=WORKFLOW_FLAG)
        if threading.active_count() > before:
            names = ", ".join(thread.name for thread in threading.enumerate()[before:])
            print(f"importing the workflow started threads ({names}); they do not run in its workers", file=sys.stderr)
        self._arguments = arguments
        self._stopping = False
        self._workers = ForkedWorkers(
            lambda number, runner: asyncio.run(_work(arguments, key, number, runner, workflow_class))
        )

    def run(self) -> int:
        for interrupt in (signal.SIGINT, signal.SIGTERM):
            signal.signal(interrupt, self._stop)
        count = self._arguments.workers
        for number in range(count):
            self._workers.start(number)
        workers = "1 worker" if count == 1 else f"{count} workers"
        print(f"{workers} for {self._arguments.connect} (Ctrl-C: finish and stop; twice: stop)", flush=True)
        return self._watch()

    def _stop(self, signal_number: int = signal.SIGTERM, *_: object) -> None:
        if self._stopping and signal_number == signal.SIGINT:  # an episode may take long, or hang
            self._workers.kill()
        self._stopping = True
        self._workers.stop()

    def _watch(self) -> int:
        from ajet.task_runner.remote import ABANDONED

        code = 0
        while self._workers:
            number, ended_with = self._workers.wait()
            if self._stopping:
                continue
            if ended_with in (AWAY, REFUSED):  # it has said why; the others would say the same
                code = 1 if ended_with == AWAY else UserError.exit_code
                self._stop()
                continue
            if ended_with not in (0, ABANDONED):
                print(f"worker {number} ended with {ended_with}: replaced", file=sys.stderr, flush=True)
                time.sleep(RESTART_S)
            self._workers.start(number)
        return code


LOOK_S = 0.5
"""The interval at which the runner checks whether it should stop."""
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
    line += ["--name", f"{arguments.name}-{number}", "--patience", f"{arguments.patience}s"]
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
