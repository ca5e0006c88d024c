"""The clean process from which a server of environments forks one process per instance.

It imports the user's class once and never makes an environment itself. The set-up arrives as JSON on standard input.
The control socket receives commands, one packet each (`start` with the instance's descriptor, `kill`), and sends events
(`ready`, `refused`, `exited`). When its other end closes, all instances and this process end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from ajet.environment.instance_process import serve_instance
from ajet.environment.source import EnvironmentSettings, find_source
from ajet.schema.errors import AjetError

PACKET = 65536
PR_SET_PDEATHSIG = 1


def main(control_fd: int) -> None:
    """Serve until the control socket closes."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.load(sys.stdin)
    try:
        server = _InstanceServer(control, setup)
    except AjetError as error:
        control.send(json.dumps({"event": "refused", "error": str(error)}).encode()[:PACKET])
        return
    server.serve()


class _InstanceServer:
    """The server, with the user's code imported."""

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._source = find_source(EnvironmentSettings(**setup["settings"]), [Path(d) for d in setup["base_dirs"]])
        self._memory: int = setup["memory_bytes"]
        self._instances: dict[int, int] = {}
        """Number → process id."""

    def serve(self) -> None:
        """Carry out commands until the control socket closes."""
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            print(f"importing the environment started threads ({names}); its instances lack them", file=sys.stderr)
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        self._tell(event="ready", name=self._source.name)
        try:
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake in ready:
                    wake.recv(PACKET)
                    self._reap()
                if self._control in ready and not self._command():
                    return
        finally:
            for process in self._instances.values():
                _kill_all(process)

    def _command(self) -> bool:
        """Carry out one command. False if the control socket is closed."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET, 1)
        if not packet:
            return False
        command = json.loads(packet)
        number = command["number"]
        if command["do"] == "start":
            self._start(number, descriptors[0])
        elif number in self._instances:
            _kill_all(self._instances[number])
        return True

    def _start(self, number: int, channel: int) -> None:
        try:
            process = os.fork()
        except OSError as error:  # out of memory or processes: reported to the server
            self._tell(event="exited", number=number, error=str(error))
        else:
            if process == 0:
                self._become_instance(channel)
            self._instances[number] = process
        os.close(channel)

    def _become_instance(self, channel: int) -> NoReturn:
        code = 1
        try:
            parent = os.getppid()
            os.setsid()  # so that all it starts can be killed
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            self._control.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if self._memory:
                resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
            if "numpy" in sys.modules:  # a fork reseeds Python's generator, but not numpy's
                sys.modules["numpy"].random.seed()
            serve_instance(self._source, socket.socket(fileno=channel))
            code = 0
        except BaseException:  # noqa: BLE001 - an instance must never return to the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Kill what ended instances have started. Only then reap them: until then, their process ids aren't reused."""
        numbers = {process: number for number, process in self._instances.items()}
        while numbers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_all(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            number = numbers.pop(ended.si_pid)
            del self._instances[number]
            self._tell(event="exited", number=number, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed when the next command is read
            self._control.send(json.dumps(event).encode())


def _kill_all(process: int) -> None:
    """Kill an instance that hasn't been reaped yet, and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead a process group yet
        os.killpg(process, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
