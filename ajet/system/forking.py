"""`ForkingServer`: a small process that forks others on command, and kills and reaps them with all they started.
`ForkedWorkers`: the same for workers that a process forks from itself.

Whatever a child leaves behind, in whichever session, becomes the server's own child, and is killed (on Linux; elsewhere
what is in the child's process group is).

It imports the user's code once, before any fork, and has one thread, so forking is safe. The set-up arrives as JSON on
standard input. The control socket receives commands, one packet each (`start` with descriptors, `kill`, and what a
subclass adds), and sends events (`ready`, `refused`, `exited`). When its other end closes, all of them end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from ajet.schema.errors import AjetError
from ajet.system.processes import adopt_orphans, children, die_with, end_below, kill_below

PACKET = 65536


class ForkingServer:
    """Define `child`, and say what is imported."""

    descriptors: ClassVar[int]
    """How many descriptors come with `start`."""
    threads_warning: ClassVar[str]
    """What is said if importing the user's code started threads; `{names}` are theirs."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._process = os.getpid()
        self._children: dict[int, int] = {}
        """Number → process id."""
        self._others: set[int] = set()
        """What importing the user's code started, which is killed at the end."""

    def child(self, *descriptors: int) -> int:
        """What a forked process does. Returns its exit code. It leads a session of its own, so that all it starts can
        be killed, and dies with this server."""
        raise NotImplementedError

    def command(self, do: str, process: int) -> None:
        """Carry out a command other than `start` and `kill` on a process."""
        raise NotImplementedError(do)

    def facts(self) -> dict[str, Any]:
        """What the event `ready` says."""
        return {}

    def serve(self) -> None:
        """Carry out commands until the control socket closes."""
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            print(self.threads_warning.format(names=names), file=sys.stderr)
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        adopt_orphans()
        self._others = children()
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, all the memory it shares with this process
        self._tell(event="ready", **self.facts())
        try:
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake in ready:
                    wake.recv(PACKET)
                    self._reap()
                if self.control in ready and not self._command():
                    return
        finally:
            for process in self._children.values():
                kill_all(process)
            end_below()

    def _command(self) -> bool:
        """Carry out one command. False if the control socket is closed."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET, self.descriptors)
        except ConnectionResetError:  # closed, and our last events were never read
            return False
        if not packet:
            return False
        command = json.loads(packet)
        number = command["number"]
        if command["do"] == "start":
            self._start(number, descriptors)
        elif number in self._children:
            if command["do"] == "kill":
                kill_all(self._children[number])
            else:
                self.command(command["do"], self._children[number])
        return True

    def _start(self, number: int, descriptors: list[int]) -> None:
        try:
            process = os.fork()
        except OSError as error:  # out of memory or processes: reported to the other end
            self._tell(event="exited", number=number, error=str(error))
        else:
            if process == 0:
                self._become_child(descriptors)
            self._children[number] = process
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_child(self, descriptors: list[int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            die_with(self._process)
            adopt_orphans()
            self.control.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            reseed()
            code = self.child(*descriptors)
        except BaseException:  # noqa: BLE001 - a child must never return to the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Reap children that have ended, and kill what they have started.

        A process group is killed before its leader is reaped: until then, its number isn't used again.
        """
        numbers = {process: number for number, process in self._children.items()}
        with contextlib.suppress(ChildProcessError):  # none is left
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                number = numbers.get(ended.si_pid)
                if number is not None:
                    kill_all(ended.si_pid)
                    del self._children[number]
                _, status = os.waitpid(ended.si_pid, 0)
                self._others.discard(ended.si_pid)
                if number is not None:
                    self._tell(event="exited", number=number, code=os.waitstatus_to_exitcode(status))
        kill_below(keep={*self._children.values(), *self._others})

    def _tell(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed when the next command is read
            self.control.send(json.dumps(event).encode())


def serve(control_fd: int, make: Callable[[socket.socket, dict[str, Any]], ForkingServer]) -> None:
    """Serve until the control socket closes. If the server cannot be created (`AjetError`), say that it is refused."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = json.load(sys.stdin)
    try:
        server = make(control, setup)
    except AjetError as error:
        control.send(json.dumps({"event": "refused", "error": str(error)}).encode()[:PACKET])
        return
    server.serve()


def reseed() -> None:
    """To be called after a fork, which reseeds Python's generator, but not numpy's. numpy imports its own when it is
    needed, which then seeds itself: importing it here would take longer than a short episode."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def kill_all(process: int) -> None:
    """Kill a process that hasn't been reaped yet, and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead a process group yet
        os.killpg(process, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)


STOPPING = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """A worker that has ended."""

    number: int
    code: int
    """Its exit code; negative: the signal that killed it."""


class ForkedWorkers:
    """`body` is what a worker does: it gets the worker's number and the runner's process id, and returns the exit
    code. What a worker leaves behind is killed, and so is whatever else this process starts from now on."""

    def __init__(self, body: Callable[[int, int], int]) -> None:
        adopt_orphans()
        self._others = children()
        self._body = body
        self._numbers: dict[int, int] = {}
        """Process id → number."""
        self._stopped = False

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self, number: int) -> None:
        """Fork a worker, unless `stop` was called."""
        sys.stdout.flush()
        sys.stderr.flush()
        runner = os.getpid()
        # a signal that came between the fork and the worker's own handlers would run the runner's handlers there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            if self._stopped:
                return
            process = os.fork()
            if process == 0:
                self._become_worker(number, runner)
            self._numbers[process] = number
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Ask all workers to finish what they have begun. No other one starts."""
        self._stopped = True
        for process in list(self._numbers):
            os.kill(process, signal.SIGTERM)

    def wait(self) -> Ended:
        """Wait until a worker ends."""
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert found is not None
            number = self._numbers.get(found.si_pid)
            if number is not None:
                kill_all(found.si_pid)  # before it is reaped: until then, its process id isn't reused
            kill_below(keep={*self._numbers, *self._others})
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                _, status = os.waitpid(found.si_pid, 0)
                self._numbers.pop(found.si_pid, None)
                self._others.discard(found.si_pid)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if number is not None:
                return Ended(number, os.waitstatus_to_exitcode(status))

    def _become_worker(self, number: int, runner: int) -> NoReturn:
        code = 1
        try:
            adopt_orphans()
            os.setsid()  # Ctrl-C on the terminal reaches the runner alone, and all that a worker starts can be killed
            for stopping in STOPPING:
                signal.signal(stopping, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            reseed()
            code = self._body(number, runner)
        except BaseException:  # noqa: BLE001 - a worker must never return to the runner's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
