"""The fork server: imports the user's code once, forks a worker for each episode, reaps and kills them.

Standard input brings the set-up (JSON); the control socket brings orders, one packet each (`start` with the worker's
two descriptors, `dump`, `kill`), and takes events (`ready`, `refused`, `exited`). When its other end is gone, so are
all workers and the server. Nothing here runs user code but its import, and there is one thread, so a fork is safe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from ajet.config import Config
from ajet.schema.errors import AjetError
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_judge.load import KEY as JUDGE_KEY
from ajet.task_runner.isolation.worker import run_worker
from ajet.user_code import import_class
from ajet.workflow import Workflow

WORKFLOW_KEY = "ajet.rollout.user_workflow"
PACKET = 65536
PRELOADED = ("openai", "openai.types.chat", "openai.resources.chat")
"""What the tuner's clients import: a second's work, done once here instead of in each worker."""


def main(control_fd: int) -> None:
    """Serve until the control socket closes."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.load(sys.stdin)
    try:
        server = ForkServer(control, setup)
    except AjetError as error:
        control.send(json.dumps({"event": "refused", "error": str(error)}).encode()[:PACKET])
        return
    server.serve()


class ForkServer:
    """One server, with the user's code loaded."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._config = Config.model_validate(setup["config"])
        self._base_dirs = [Path(folder) for folder in setup["base_dirs"]]
        workflow = self._config.ajet.rollout.user_workflow or ""
        self._workflow_class = import_class(workflow, Workflow, key=WORKFLOW_KEY, base_dirs=self._base_dirs)
        judge = self._config.ajet.task_judge.judge_protocol
        if judge is not None:
            import_class(judge, BaseJudge, key=JUDGE_KEY, base_dirs=self._base_dirs)
        for name in PRELOADED:
            importlib.import_module(name)
        self._workers: dict[int, int] = {}
        """Order's number → process."""

    def serve(self) -> None:
        """Carry out orders until nobody gives any more."""
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            print(f"importing the workflow started threads ({names}); they do not run in its workers", file=sys.stderr)
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        self._tell(event="ready")
        try:
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake in ready:
                    wake.recv(PACKET)
                    self._reap()
                if self._control in ready and not self._obey():
                    return
        finally:
            for process in self._workers.values():
                _kill_all(process)

    def _obey(self) -> bool:
        """Carry out one order. False: there is nobody any more."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 2)
        if not packet:
            return False
        order = json.loads(packet)
        number = order["number"]
        if order["do"] == "start":
            self._start(number, *descriptors)
        elif number in self._workers:
            if order["do"] == "kill":
                _kill_all(self._workers[number])
            else:
                os.kill(self._workers[number], signal.SIGUSR1)  # faulthandler prints where it is
        return True

    def _start(self, number: int, channel: int, stderr: int) -> None:
        try:
            process = os.fork()
        except OSError as error:  # no memory, or no processes left: said to the one who asked
            self._tell(event="exited", number=number, error=str(error))
        else:
            if process == 0:
                self._become_worker(channel, stderr)
            self._workers[number] = process
        os.close(channel)
        os.close(stderr)

    def _become_worker(self, channel: int, stderr: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._control.close()
            run_worker(self._config, self._workflow_class, self._base_dirs, socket.socket(fileno=channel), stderr)
        except BaseException:  # noqa: BLE001 - a worker never returns into the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """A worker that has ended takes with it what it started; only then is its number given back to the system."""
        numbers = {process: number for number, process in self._workers.items()}
        while numbers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_all(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            number = numbers.pop(ended.si_pid)
            del self._workers[number]
            self._tell(event="exited", number=number, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed by the next order
            self._control.send(json.dumps(event).encode())


def _kill_all(process: int) -> None:
    """Kill a worker that is not reaped yet, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead its group yet
        os.killpg(process, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
