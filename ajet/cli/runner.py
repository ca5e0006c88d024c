"""`ajet runner`: run episodes of a training run elsewhere, with this machine's workflow code.

It needs neither torch nor a GPU. Each worker is a process of its own: one that crashes or hangs is replaced.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ajet.schema.errors import UserError

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
    parser.add_argument("--as-worker", metavar="NAME", help="what the processes that this one starts are told")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error("--workers is at least 1")
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise UserError(
            f"{KEY_VARIABLE} is not set: the run prints it when it starts, or export the same on both sides"
        )
    if arguments.as_worker:
        return asyncio.run(_work(arguments, key))
    return _Runner(arguments).run()


async def _work(arguments: Namespace, key: str) -> int:
    from ajet.cli.store import seconds
    from ajet.store.errors import StoreUnavailableError
    from ajet.task_runner.remote_worker import WorkerSettings, work
    from ajet.user_code import import_class
    from ajet.workflow import Workflow

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C reaches the runner, which tells its workers
    try:
        workflow_class = import_class(arguments.workflow, Workflow, key=WORKFLOW_FLAG)
        patience = seconds(arguments.patience)
        settings = WorkerSettings(arguments.connect, key, arguments.as_worker, arguments.ca, patience)
        await work(settings, workflow_class, stop)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return AWAY if isinstance(error, StoreUnavailableError) else REFUSED
    return 0


class _Runner:
    """Starts the workers, replaces those that end, and ends them all."""

    def __init__(self, arguments: Namespace) -> None:
        self._arguments = arguments
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def run(self) -> int:
        from ajet.user_code import import_class
        from ajet.workflow import Workflow

        import_class(self._arguments.workflow, Workflow, key=WORKFLOW_FLAG)
        for interrupt in (signal.SIGINT, signal.SIGTERM):
            signal.signal(interrupt, self._stop)
        for number in range(self._arguments.workers):
            self._start(number)
        print(f"{self._arguments.workers} workers for {self._arguments.connect} (Ctrl-C: finish and stop)", flush=True)
        return self._watch()

    def _start(self, number: int) -> None:
        command = [sys.executable, "-m", "ajet", "runner", "--as-worker", f"{self._arguments.name}-{number}"]
        for flag in ("connect", "workflow", "ca", "patience"):
            if (value := getattr(self._arguments, flag)) is not None:
                command += [f"--{flag}", value]
        self._workers[number] = subprocess.Popen(command, start_new_session=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for worker in self._workers.values():
            worker.terminate()

    def _watch(self) -> int:
        from ajet.task_runner.remote_worker import ABANDONED

        code = 0
        while self._workers:
            process, status = os.wait()
            number = next((number for number, worker in self._workers.items() if worker.pid == process), None)
            if number is None:
                continue
            ended = self._workers.pop(number)
            ended.returncode = os.waitstatus_to_exitcode(status)
            if self._stopping:
                continue
            if ended.returncode in (AWAY, REFUSED):  # it has said why; the others would say the same
                code = 1 if ended.returncode == AWAY else UserError.exit_code
                self._stop()
            else:
                if ended.returncode not in (0, ABANDONED):
                    print(f"worker {number} ended with {ended.returncode}: replaced", file=sys.stderr, flush=True)
                    time.sleep(RESTART_S)
                self._start(number)
        return code
