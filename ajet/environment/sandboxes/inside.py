"""The first process of a bubblewrap sandbox: starts commands, and ends with its owner.

It runs inside, as process 1, from this one file and nothing of ajet's. Requests arrive on one descriptor, a packet
each: a number, and the descriptors of what is asked and of the streams to connect. Answers are a number and a result.
When the other end closes, it exits, and the kernel ends every process of the sandbox with it. Commands can't signal it
(it is process 1), trace it or look into it (it isn't dumpable, and a filter forbids tracing).

Imports are few on purpose, and none loads a module that isn't part of the interpreter's start (`array` would load
`collections`): a sandbox starts as fast as this file does.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found] # `signal` loads `enum` and `re`: a third of the start
import _socket
import os
import resource
import select
import sys
from time import clock_gettime

DESCRIPTOR = 4
"""Bytes of a descriptor in a packet: a C int."""
POLL_S = 0.05
"""How often files are counted, and memory where no cgroup does it."""
IN_MEMORY = ("/tmp", "/dev/shm")
"""Besides the folders that the options name."""
KILL_PASSES = 200
PAGE = os.sysconf("SC_PAGE_SIZE")


class Inside:
    """The state: what runs, and how commands are confined."""

    def __init__(self, options: dict[str, str]) -> None:
        self.uid = int(options["uid"])  # -1: commands run as this process does
        self.memory = int(options["memory"]) << 20
        self.watch = options["watch"] == "1"
        self.processes = int(options["processes"])
        self.file_size = int(options["disk"]) << 20
        self.deadline = _now() + float(options["lifetime"])
        self.descriptor = int(options["control"])
        os.set_inheritable(self.descriptor, False)
        self.control = _socket.socket(fileno=self.descriptor)
        self.running: dict[int, tuple[str, frozenset[int]]] = {}
        """Process id → request, and the processes that there were before it."""
        self.most_files = self.file_size // PAGE
        self.in_memory = (*options["folders"].split(":"), *IN_MEMORY)

    def serve(self) -> None:
        """Serve until the owner hangs up, or the sandbox's lifetime is over."""
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel drops what process 1 has no handler for; Python has
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.register(wake, select.POLLIN)
        self.control.send(b"0 ready")
        while _now() < self.deadline:
            busy = bool(_processes())  # also what a command has left behind
            pause = POLL_S if busy else min(self.deadline - _now(), 3600)
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, pause) * 1000)]
            if wake in ready:
                os.read(wake, 4096)
            self.reap()
            if self.descriptor in ready and not self.request():
                return
            if busy:
                self.check_files()
            if self.watch and busy:
                self.check_memory()
        self.control.send(b"0 lifetime")

    def request(self) -> bool:
        """Take one request. False: the owner has hung up."""
        packet, ancillary, _, _ = self.control.recvmsg(64, _socket.CMSG_SPACE(8 * DESCRIPTOR))
        if not packet:
            return False
        number, _, action = packet.decode().partition(" ")
        descriptors = [
            int.from_bytes(data[at : at + DESCRIPTOR], sys.byteorder)
            for _, _, data in ancillary
            for at in range(0, len(data) - DESCRIPTOR + 1, DESCRIPTOR)
        ]
        try:
            self.act(number, action, descriptors)
        except OSError as error:
            self.answer(number, f"error {error.errno}")
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def act(self, number: str, action: str, descriptors: list[int]) -> None:
        """Do what is asked."""
        if action == "kill":
            self.kill(number)
        elif action == "listen":
            self.listen(number, descriptors)
        else:
            with open(descriptors[0], "rb", closefd=False) as file:
                fields = [field.decode("utf-8", "surrogateescape") for field in file.read().split(b"\0")]
            before = frozenset(_processes())
            process = os.fork()
            if process:
                self.running[process] = (number, before)
                return
            code = 125
            try:
                code = self.child(fields, descriptors[1:])
            finally:
                os._exit(code)

    def answer(self, number: str, text: str) -> None:
        """Answer a request."""
        self.control.send(f"{number} {text}".encode())

    # ------------------------------------------------------------ in the new process

    def child(self, fields: list[str], descriptors: list[int]) -> int:
        """Become one of the sandbox's commands. Returns an exit code, unless another program takes over."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        os.closerange(3, 256)
        self.confine()
        return run(fields)

    def confine(self) -> None:
        """Limits, and another user."""
        limits = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_FSIZE, self.file_size),
            (resource.RLIMIT_NPROC, self.processes),
        ]
        if self.watch:
            limits.append((resource.RLIMIT_DATA, self.memory))
        for limit, value in limits:
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        if self.uid >= 0:
            with open("/proc/self/oom_score_adj", "w") as file:  # if memory runs out, not process 1
                file.write("500")
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)

    # ------------------------------------------------------------ ends

    def reap(self) -> None:
        """Report commands that have ended, and free everything that has."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            ended = self.running.pop(process, None)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self.answer(ended[0], f"exit {code if code >= 0 else 128 - code}")

    def kill(self, number: str) -> None:
        """End a command, its descendants, and what has been started in the background since it began."""
        main = {process for process, (request, _) in self.running.items() if request == number}
        before = frozenset[int]().union(*(self.running[process][1] for process in main))
        for _ in range(KILL_PASSES if main else 0):
            found = self.processes_of(main, before)
            for process in found:
                _signal(process, signal.SIGKILL)
            self.reap()
            if not found:
                return
        if main:  # it starts others faster than they can be found
            os.kill(-1, signal.SIGKILL)

    def processes_of(self, main: set[int], before: frozenset[int]) -> list[int]:
        """The processes to end along with a command: its own, and those that came after it and are no other's."""
        parents: dict[int, int] = {}
        for process in _processes():
            fields = _stat(process)
            if fields:
                parents[process] = int(fields[1])
        others = set(self.running) - main
        found = []
        for process in parents:
            line = [process]
            while line[-1] in parents and parents[line[-1]] not in (0, 1):
                line.append(parents[line[-1]])
            late = process not in before
            if any(each in main for each in line) or (late and not others.intersection(line)):
                found.append(process)
        return found

    def check_memory(self) -> None:
        """Where no cgroup counts: end the largest process of a sandbox that has too much memory."""
        sizes = {process: _resident(process) for process in _processes()}
        if sizes and sum(sizes.values()) > self.memory:
            _signal(max(sizes, key=lambda process: sizes[process]), signal.SIGKILL)

    def check_files(self) -> None:
        """Empty files take memory that no file system's size limits, and that no cgroup frees by ending processes. End
        everything once there are more than the disk has pages; then it takes twice as many, so that some can be
        removed."""
        files = 0
        for place in self.in_memory:
            about = os.statvfs(place)
            files += about.f_files - about.f_ffree
        if files > self.most_files:
            _signal(-1, signal.SIGKILL)
            self.most_files = 2 * (self.file_size // PAGE)

    def listen(self, number: str, descriptors: list[int]) -> None:
        """Open a port on this network's loopback, and hand the socket to the owner, who answers there."""
        with open(descriptors[0], "rb", closefd=False) as file:
            port = int(file.read())
        server = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen(128)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, server.fileno().to_bytes(DESCRIPTOR, sys.byteorder))]
        self.control.sendmsg([f"{number} socket".encode()], rights)
        server.close()


def run(fields: list[str]) -> int:
    """Become the program: folder, count of arguments, arguments, variables."""
    folder, count = fields[0], int(fields[1])
    arguments, variables = fields[2 : 2 + count], dict(field.split("=", 1) for field in fields[2 + count :] if field)
    try:
        os.chdir(folder)
    except OSError as error:
        os.write(2, f"cannot work in {folder}: {error.strerror}\n".encode("utf-8", "replace"))
        return 1
    program = arguments[0]
    found: OSError | None = None
    for place in [""] if "/" in program else variables.get("PATH", "").split(":"):
        try:
            os.execve(os.path.join(place, program), arguments, variables)
        except OSError as error:
            found = found if isinstance(error, (FileNotFoundError, NotADirectoryError)) else error
    os.write(2, f"{program}: {found.strerror if found else 'not found'}\n".encode("utf-8", "replace"))
    return 126 if found else 127


def hide() -> None:
    """Where commands run as the same user: make this process one that they can't look into."""
    import ctypes  # slow to import, and needed here alone

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def _now() -> float:
    """Seconds since the machine started, as /proc counts them."""
    return clock_gettime(7)  # CLOCK_BOOTTIME


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _stat(process: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else fields


def _resident(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0


def _signal(process: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib is one more import
        os.kill(process, number)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if settings["uid"] == "-1":
        hide()
    Inside(settings).serve()
