"""The processes of a run: child processes that end with it, and those recorded, so that `--kill` ends them alone.

Everything a run starts inherits a mark in its environment, so orphans are found too. A long title that a process gives
itself, as Ray's do, may overwrite the mark; it still stays in its session. Records lie in a per-user state folder and
hold the process's start time, so that a reused process id is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from ajet.schema.errors import UserError
from ajet.schema.files import write_whole

STARTED_BY = "AJET_STARTED"
"""Environment variable with the id of the record that a process belongs to."""
RAY_RUN = "AJET_RAY_RUN"
"""Environment variable with the id of the Ray run that a process belongs to. Ray starts processes that outlive the
driver, and each run has to end its own."""
PATIENCE_S = 8.0
"""How long processes may take to end by themselves before they are killed."""
RUN_PATIENCE_S = 10.0
"""The same for a whole run: Ctrl-C promises to end it within this time."""
KILL_S = 3.0
"""How long killed processes may take to disappear."""


# ---------------------------------------------------------------- find and end


def processes_of(variable: str, mark: str, session: int | None = None) -> set[psutil.Process]:
    """Live processes that carry the mark in this environment variable, or belong to the session. Never this one."""
    found = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if (_in_session(process, session) or _carries(process, variable, mark)) and _is_alive(process):
                found.add(process)
        except (psutil.Error, OSError):  # another user's process, or one that has just ended
            continue
    return found


def end_all(
    variable: str,
    mark: str,
    patience_s: float = PATIENCE_S,
    *,
    session: int | None = None,
    leader: psutil.Process | None = None,
) -> int:
    """Ask these processes to end, then kill those that remain. Returns how many there were.

    The leader is asked first, as it may end the others in order.
    """

    def running() -> set[psutil.Process]:
        found = processes_of(variable, mark, session)
        return found | {leader} if leader is not None and _is_alive(leader) else found

    everyone = set()
    if leader is not None and _is_alive(leader):
        everyone.add(leader)
        _terminate(leader)
        _wait_until(lambda: not _is_alive(leader), patience_s)
        patience_s /= 2
    left = running()
    everyone |= left
    for process in left:
        _terminate(process)
    _wait_until(lambda: not running(), patience_s)
    give_up = time.monotonic() + KILL_S
    while (left := running()) and time.monotonic() < give_up:
        everyone |= left
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return len(everyone)


def _carries(process: psutil.Process, variable: str, mark: str) -> bool:
    """Whether the mark is in its environment.

    A title that the process gave itself overwrites the start of its environment and leaves empty entries there, at
    which psutil stops reading. The mark may stand behind them.
    """
    if not psutil.LINUX:
        return process.environ().get(variable) == mark
    content = Path("/proc", str(process.pid), "environ").read_bytes()
    return f"{variable}={mark}".encode() in content.split(b"\0")


def _in_session(process: psutil.Process, session: int | None) -> bool:
    return session is not None and os.getsid(process.pid) == session


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _terminate(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.terminate()


def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(0.05)


# ---------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Record:
    """A process that ajet started, or a run itself."""

    id: str
    """What the processes it starts carry in `STARTED_BY`."""
    name: str
    prefix: str
    pid: int
    started: float
    """Seconds between the system's boot and its start, which changes of the clock don't affect."""
    host: str
    command: str

    def process(self) -> psutil.Process | None:
        """The process, if it is still running."""
        try:
            process = psutil.Process(self.pid)
            same = abs(_start_time(process) - self.started) < 0.05
        except psutil.Error:
            return None
        return process if same and _is_alive(process) else None


def state_folder() -> Path:
    """The per-user folder of records and service logs."""
    base = os.environ.get("AJET_STATE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ajet"


def made_state_folder() -> Path:
    """The same, made if needed. A container's user often has a home that can't be written."""
    folder = state_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}\n    ajet notes there what it starts, for `ajet --kill`: "
            "set AJET_STATE_DIR to a folder that you may write"
        ) from error
    return folder


@contextmanager
def recorded(mark: str, name: str, prefix: str, pid: int, command: str) -> Iterator[None]:
    folder = made_state_folder()
    try:
        started = _start_time(psutil.Process(pid))
    except psutil.NoSuchProcess:
        started = 0.0
    record = Record(mark, name, prefix, pid, started, socket.gethostname(), command)
    file = folder / f"{record.host}-{pid}-{mark[:8]}.json"
    write_whole(file, json.dumps(asdict(record)))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def recorded_run(experiment: Path, prefix: str = "") -> Iterator[None]:
    """Record this process, and mark everything it starts, for the duration of the block."""
    mark = uuid.uuid4().hex
    before = os.environ.get(STARTED_BY)
    os.environ[STARTED_BY] = mark
    try:
        with recorded(mark, f"run {experiment}", prefix, os.getpid(), "ajet"):
            yield
    finally:
        if before is None:
            os.environ.pop(STARTED_BY, None)  # a workflow in a thread may have emptied it
        else:
            os.environ[STARTED_BY] = before


def end_recorded(prefix: str = "") -> list[str]:
    """End everything that is recorded (with a prefix: only what has it), and report what was ended."""
    report = []
    for file, record in _records():
        if (prefix and record.prefix != prefix) or record.pid == os.getpid():
            continue
        ended = end_all(STARTED_BY, record.id, RUN_PATIENCE_S, leader=record.process())
        file.unlink(missing_ok=True)
        if ended:
            report.append(f"ended {record.prefix}{record.name} ({ended} process{'es' if ended > 1 else ''})")
    return report or ["nothing that ajet started is still running"]


def still_running() -> list[str]:
    """The names of recorded processes that are still running."""
    return [f"{record.prefix}{record.name}" for _, record in _records() if record.process() is not None]


def _start_time(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def _records() -> Iterator[tuple[Path, Record]]:
    """The records of this host. Files that can't be read are removed."""
    for file in sorted(state_folder().glob("*.json")):
        try:
            record = Record(**json.loads(file.read_text()))
        except FileNotFoundError:  # its process has removed it
            continue
        except (ValueError, TypeError):
            file.unlink(missing_ok=True)
            continue
        if record.host == socket.gethostname():
            yield file, record


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_BECOME = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def die_with(parent: int) -> None:
    """From now on, the kernel kills this process when its parent ends; it ends now if its parent is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we said that we want to know
        os._exit(1)


_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, a process below this one whose parent ends becomes this one's child, wherever its session is.

    Linux only. Elsewhere such a process belongs to the system's first one, and nobody knows who started it.
    """
    if psutil.LINUX:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The process ids of this process's children.

    Where the kernel lists them, they are read there: `psutil` looks through all processes of the machine, which would
    cost more than all else that is done about a child that has ended.
    """
    try:
        lists = [task.joinpath("children").read_text() for task in Path("/proc/self/task").iterdir()]
    except FileNotFoundError:  # not Linux, a kernel that has no such lists, or a thread that has ended meanwhile
        return {child.pid for child in psutil.Process().children()}
    return {int(child) for text in lists for child in text.split()}


def kill_below(keep: Collection[int] = ()) -> None:
    """Kill all processes below this one, but for the children `keep` and what is below them.

    To be called again whenever a child has ended: it may have had others, which this process then has adopted.
    """
    for number in children().difference(keep):
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(number)
            for process in [child, *child.children(recursive=True)] if _is_alive(child) else ():
                with suppress(psutil.Error):
                    process.kill()


def end_below() -> None:
    """Kill all processes below this one, and leave nothing of them."""
    while True:
        kill_below()
        try:
            os.wait()
        except ChildProcessError:
            return


def ending_with_us(command: list[str]) -> list[str]:
    """Wrap an external program's command, so that it gets SIGTERM when the thread that started it is gone."""
    return [sys.executable, "-c", _BECOME, *command]


def output_of(*command: str, within_s: float) -> str | None:
    """What a program prints, stripped; None if it is absent, fails, or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()


class MainMemory(NamedTuple):
    """Bytes of main memory."""

    total: int
    available: int


def main_memory() -> MainMemory:
    """What this process may use: the machine's, or less if a container or a batch job (a cgroup of either version, or
    one above it) limits it. Cached files count as available there, too."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for group in _memory_groups():
        try:
            two = (group / "memory.max").exists()
            limit = int((group / ("memory.max" if two else "memory.limit_in_bytes")).read_text())
            used = int((group / ("memory.current" if two else "memory.usage_in_bytes")).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the root, or `max`: no limit
            continue
        used -= sum(int(stat.get(f"{'' if two else 'total_'}{kind}_file", 0)) for kind in ("active", "inactive"))
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MainMemory(total, available)


def _memory_groups() -> Iterator[Path]:
    """This process's memory cgroup and those above it. A container may see itself as the topmost one."""
    file = Path("/proc/self/cgroup")
    for line in file.read_text().splitlines() if file.exists() else ():
        _, names, path = line.split(":", 2)
        if not names or "memory" in names.split(","):
            place = Path(path.lstrip("/"))
            for group in (place, *place.parents):
                yield CGROUPS / ("memory" if names else "") / group


CGROUPS = Path("/sys/fs/cgroup")

PIPE_BYTES = 1 << 20
"""Most questions fit into the pipe at once, so that asking is not interrupted again and again."""
LESS_URGENT = 5
"""Its owner's service loop goes first where there are too few cores."""


class ChildProcess:
    """A Python program of ours that answers each line of its standard input with one line of its standard output.

    For one thread at a time, and never a service loop's: asking waits for the answer.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        # -P: our folders' modules mustn't hide the standard library's
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        with contextlib.suppress(OSError):  # it has ended already, which `ask` will notice
            os.setpriority(os.PRIO_PROCESS, self._child.pid, os.getpriority(os.PRIO_PROCESS, 0) + LESS_URGENT)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._questions, self._answers = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._questions, False)
        with contextlib.suppress(OSError):  # the user's share of large pipes is taken
            fcntl.fcntl(self._questions, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, question: bytes, within_s: float) -> bytes:
        """The line with which it answers. Raises TimeoutError, or ConnectionError if it ended: in both cases, and
        whatever else is raised, `end` it."""
        until = time.monotonic() + within_s
        rest = memoryview(question)
        while rest:
            _wait(self._questions, select.POLLOUT, until)
            try:
                rest = rest[os.write(self._questions, rest) :]
            except OSError as error:
                raise ConnectionError(str(error)) from error
        answer = b""
        while not answer.endswith(b"\n"):
            _wait(self._answers, select.POLLIN, until)
            piece = os.read(self._answers, 65_536)
            if not piece:
                raise ConnectionError("it ended")
            answer += piece
        return answer

    def kill(self) -> None:
        """Kill it, from any thread. A pending `ask` raises ConnectionError."""
        self._child.kill()

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it didn't read any more
                    pipe.close()


def _wait(pipe: int, event: int, until: float) -> None:
    """Wait for a pipe. Raises TimeoutError."""
    poll = select.poll()  # `select` takes no file numbers above 1023, which a server with many connections has
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
