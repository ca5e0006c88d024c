"""The fork server: imports the user's code once, then forks, kills and reaps a worker process for each attempt.

The set-up arrives as JSON on standard input. The control socket receives commands, one packet each (`start` with the
worker's two descriptors, `dump`, `kill`), and sends events (`ready`, `refused`, `exited`). When the other end closes,
all workers and the server end. The only user code that runs here is its import, and there is one thread, so forking is
safe.
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
from ajet.task_judge.base_judge import JUDGE_KEY, BaseJudge
from ajet.task_runner.environments import find_environment
from ajet.task_runner.sandboxes import find_sandbox
from ajet.task_runner.worker import run_worker
from ajet.task_runner.workflow_class import load_workflow
from ajet.user_code import import_class

PACKET = 65536
PRELOADED = ("openai", "openai.types.chat", "openai.resources.chat")
"""What the tuner's clients import: it takes a second, so it is done once, here."""


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
    """The server, with the user's code imported."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._config = Config.model_validate(setup["config"])
        self._base_dirs = [Path(folder) for folder in setup["base_dirs"]]
        self._workflow_class = load_workflow(self._config, self._base_dirs)
        judge = self._config.ajet.task_judge.judge_protocol
        if judge is not None:
            import_class(judge, BaseJudge, key=JUDGE_KEY, base_dirs=self._base_dirs)
        self._environments = find_environment(self._config, self._base_dirs)
        self._sandboxes = find_sandbox(self._config, self._base_dirs)
        for name in PRELOADED:
            importlib.import_module(name)
        self._workers: dict[int, int] = {}
        """Number → process id."""

    def serve(self) -> None:
        """Carry out commands until the control socket closes."""
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
                if self._control in ready and not self._command():
                    return
        finally:
            for process in self._workers.values():
                kill_all(process)

    def _command(self) -> bool:
        """Carry out one command. False if the control socket is closed."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 2)
        if not packet:
            return False
        command = json.loads(packet)
        number = command["number"]
        if command["do"] == "start":
            self._start(number, *descriptors)
        elif number in self._workers:
            if command["do"] == "kill":
                kill_all(self._workers[number])
            else:
                os.kill(self._workers[number], signal.SIGUSR1)  # faulthandler prints its stack
        return True

    def _start(self, number: int, channel: int, stderr: int) -> None:
        try:
            process = os.fork()
        except OSError as error:  # out of memory or processes: reported to the client
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
            theirs = socket.socket(fileno=channel)
            run_worker(
                self._config,
                self._workflow_class,
                self._environments,
                self._sandboxes,
                self._base_dirs,
                theirs,
                stderr,
            )
        except BaseException:  # noqa: BLE001 - a worker must never return to the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Kill what ended workers have started. Only then reap them: until then, their process ids aren't reused."""
        numbers = {process: number for number, process in self._workers.items()}
        while numbers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            kill_all(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            number = numbers.pop(ended.si_pid)
            del self._workers[number]
            self._tell(event="exited", number=number, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed when the next command is read
            self._control.send(json.dumps(event).encode())


def kill_all(process: int) -> None:
    """Kill a worker that hasn't been reaped yet, and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead a process group yet
        os.killpg(process, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
