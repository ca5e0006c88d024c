"""The processes of a run: found, ended, and recorded so that `--kill` ends them and nothing else.

Everything a run starts inherits a mark in its environment, so orphans are found too. A long title that a process gives
itself, as Ray's do, may overwrite the mark; it still stays in its session. Records lie in a per-user state folder and
hold the process's start time, so that a reused process id is never mistaken for it.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

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


@contextmanager
def recorded(mark: str, name: str, prefix: str, pid: int, command: str) -> Iterator[None]:
    """Record a process for the duration of the block."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        started = _start_time(psutil.Process(pid))
    except psutil.NoSuchProcess:
        started = 0.0
    record = Record(mark, name, prefix, pid, started, socket.gethostname(), command)
    file = folder / f"{record.host}-{pid}-{mark[:8]}.json"
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(record)))
    scratch.replace(file)
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
            del os.environ[STARTED_BY]
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
