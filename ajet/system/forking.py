"""`ForkingServer`: a small process that forks others on command, and kills and reaps them with all they started.
`ForkingClient` starts one and commands it. `ForkedWorkers`: the same for workers that a process forks from itself.

Whatever a child leaves behind, in whichever session, becomes the server's own child, and is killed (on Linux; elsewhere
what is in the child's process group is).

It imports the user's code once, before any fork, and has one thread, so forking is safe. The set-up arrives as JSON on
standard input. The control socket receives commands, one packet each (`start` with descriptors, `kill`, and what a
subclass adds), and sends events (`ready`, `refused`, `exited`). When its other end closes, all of them end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from ajet.schema.errors import AjetError, UserError
from ajet.system.processes import adopt_orphans, children, die_with, end_below, kill_below

PACKET = 65536
EXIT_NOTICE_S = 2.0
"""How long to wait for a process's exit status after its channel has closed."""


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


BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from ajet.system.forking import serve; "
    "from {module} import {name}; serve(int(sys.argv[2]), {name})"
)


WITH_SERVER = "ended with the process that forked it"
"""How a process ended whose server was killed, by the system's lack of memory for example."""


class ForkingClient:
    """Starts a `ForkingServer` and sends it commands, from one event loop. `ready` waits for its imports."""

    def __init__(self, server: tuple[str, str], setup: dict[str, Any], refused: type[UserError] = UserError) -> None:
        """`server`: the module and name of its class. `refused`: raised if its user's code can't be imported."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        module, name = server
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(module=module, name=name), json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to this process, which ends that one
        )
        theirs.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ready` will report it
            self._process.stdin.write(json.dumps(setup).encode())
            self._process.stdin.close()
        self._refused = refused
        self._numbers = itertools.count(1)
        self._exits: dict[int, asyncio.Future[str]] = {}
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        """Commands, and their descriptors, that the socket had no room for: several hundred may come at once."""

    @property
    def died(self) -> bool:
        """Whether the server has ended after it was ready."""
        ready = self._ready is not None and self._ready.done() and self._ready.exception() is None
        return ready and self._process.poll() is not None

    async def ready(self) -> dict[str, Any]:
        """What the event `ready` says. Raises a `UserError` if the user's code can't be imported."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            loop.add_reader(self._ours, self._receive)
        return await asyncio.shield(self._ready)

    def start(self, *descriptors: int) -> int:
        """Fork a process that gets copies of these descriptors. Returns its number."""
        number = next(self._numbers)
        self._exits[number] = asyncio.get_running_loop().create_future()
        self._send({"do": "start", "number": number}, descriptors)
        return number

    def command(self, do: str, number: int) -> None:
        """`kill` a process and everything it started, or what else its server can do to it."""
        closed = self._ours.fileno() < 0  # then the server has already ended its processes
        if number in self._exits and not closed:
            self._send({"do": do, "number": number})

    async def exit_of(self, number: int) -> str:
        if (ended := self._exits.get(number)) is None:
            return "ended"
        try:
            return await asyncio.wait_for(asyncio.shield(ended), EXIT_NOTICE_S)
        except TimeoutError:
            return "closed its channel"

    def forget(self, number: int) -> None:
        self._exits.pop(number, None)

    def close(self) -> None:
        """End the server and all its processes."""
        self._is_gone()
        self._ours.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, command: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        self._unsent.append((json.dumps(command).encode(), [os.dup(each) for each in descriptors]))
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what there is room for. The loop calls this again when there is more."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                packet, descriptors = self._unsent[0]
                socket.send_fds(self._ours, [packet], descriptors)
                self._unsent.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)
            loop.remove_writer(self._ours)
        except BlockingIOError:
            loop.add_writer(self._ours, self._send_waiting)
        except (BrokenPipeError, ConnectionResetError):
            self._is_gone()

    def _is_gone(self) -> None:
        """The server has ended, and all its processes with it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ours)
        loop.remove_writer(self._ours)
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                UserError("the process that imports the user's code ended meanwhile: see its output above")
            )
            self._ready.exception()  # not to be logged: after Ctrl-C, nobody waits for it any more
        for ended in self._exits.values():
            if not ended.done():
                ended.set_result(WITH_SERVER)

    def _receive(self) -> None:
        assert self._ready is not None
        try:
            packet = self._ours.recv(PACKET)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._is_gone()
            return
        event = json.loads(packet)
        if event["event"] == "ready":
            self._ready.set_result(event)
        elif event["event"] == "refused":
            self._ready.set_exception(self._refused(event["error"]))
        elif (ended := self._exits.get(event["number"])) is not None and not ended.done():
            ended.set_result(_how(event))


def _how(event: dict[str, Any]) -> str:
    code = event.get("code")
    if code is None:
        return f"could not be started: {event.get('error')}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def reseed() -> None:
    """Call this after a fork, which reseeds Python's generator, but not numpy's. numpy imports its own when it is
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

    def kill(self) -> None:
        """End all workers, whatever they are doing."""
        for process in list(self._numbers):
            kill_all(process)

    def wait(self) -> Ended:
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
