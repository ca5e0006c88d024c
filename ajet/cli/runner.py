"""`ajet runner`: run episodes of a training run elsewhere, with this machine's workflow code.

It needs neither torch nor a GPU. Each worker is a process of its own, forked from the runner: one that crashes or hangs
is replaced at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ajet.schema.errors import UserError
from ajet.schema.printable import printable

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
    parser = ArgumentParser("ajet runner", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="URL", help="where the run serves its episodes")
    parser.add_argument(WORKFLOW_FLAG, required=True, metavar="FILE.py->CLASS", help="the workflow, on this machine")
    parser.add_argument("--workers", type=int, default=1, help="episodes at a time (default: 1)")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="how the run calls this runner")
    parser.add_argument("--ca", metavar="FILE", help="PEM file with the authority of the run's certificate")
    parser.add_argument("--patience", default="10m", metavar="TIME", help="how long the run may be away (default: 10m)")
    parser.add_argument("--with-ray", type=int, metavar="N", help="N such runners as actors of a Ray cluster")
    parser.add_argument("--ray-address", metavar="ADDR", help="the cluster (default: RAY_ADDRESS, or this machine's)")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error("--workers is at least 1")
    if arguments.with_ray is not None and arguments.with_ray < 1:
        parser.error("--with-ray is at least 1")
    if arguments.ray_address and arguments.with_ray is None:
        parser.error("--ray-address goes with --with-ray")
    address = urlsplit(arguments.connect)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UserError(f"--connect: {arguments.connect!r} is not an address: it looks like http://host:port")
    _check(arguments)
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise UserError(
            f"{KEY_VARIABLE} is not set: the run prints it when it starts, or export the same on both sides"
        )
    if arguments.with_ray is not None:
        from ajet.cli.runners_on_ray import place

        return place(arguments, key)
    return _Runner(arguments, key).run()


def _check(arguments: Namespace) -> None:
    """What the workers would meet later, each for itself."""
    from ajet.cli.store import seconds

    seconds(arguments.patience)
    if arguments.ca:
        try:
            ssl.create_default_context(cafile=arguments.ca)
        except OSError as error:  # also what ssl raises
            raise UserError(
                f"--ca {arguments.ca}: {error.strerror or error}\n"
                "    give the PEM file of the authority that signed the run's certificate"
            ) from None


async def _work(arguments: Namespace, key: str, number: int, runner: int, workflow_class: type[Workflow]) -> int:
    """In a worker."""
    from ajet.cli.store import seconds
    from ajet.store.errors import KeyRefusedError, StoreUnavailableError
    from ajet.task_runner.remote_worker import WorkerSettings, work

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        patience = seconds(arguments.patience)
        name = f"{arguments.name}-{number}"
        settings = WorkerSettings(arguments.connect, key, name, arguments.ca, patience, parent=runner)
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
        from ajet.task_runner.forked_workers import ForkedWorkers
        from ajet.task_runner.tuner.rehearsal import rehearse
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
        print(f"{workers} for {self._arguments.connect} (Ctrl-C: finish and stop)", flush=True)
        return self._watch()

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self._workers.stop()

    def _watch(self) -> int:
        from ajet.task_runner.remote_worker import ABANDONED

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
