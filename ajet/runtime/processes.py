"""Processes that a run starts beside itself, and the record by which `--kill` ends them and nothing else.

Each process is recorded in a per-user state folder with its start time, so a process id that was given to another
program meanwhile is not touched. What is recorded also carries a mark in its environment, which its children inherit:
so grandchildren that outlived their parent are found too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ajet.schema.errors import UserError

MARK = "AJET_STARTED"
"""Environment variable that names the record a process belongs to."""
PATIENCE_S = 10.0
"""How long a process may take to end by itself: what Ctrl-C promises for a run."""
SERVICE_PATIENCE_S = 5.0


class ServiceError(UserError):
    """A `--with-NAME` service that can't be started."""


@dataclass(frozen=True, slots=True)
class Record:
    """A process of ours."""

    id: str
    name: str
    prefix: str
    pid: int
    started: int
    """Clock ticks between boot and its start: with the pid, unique until the next boot."""
    boot: str
    host: str
    command: str


def state_folder() -> Path:
    """The per-user folder of records and service logs."""
    base = os.environ.get("AJET_STATE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ajet"


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none (or only its exit code is left)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _record(mark: str, name: str, prefix: str, pid: int, command: str) -> Path:
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    record = Record(mark, name, prefix, pid, start_time(pid) or 0, _boot(), socket.gethostname(), command)
    file = folder / f"{record.host}-{pid}-{mark[:8]}.json"
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(record)))
    scratch.replace(file)
    return file


@contextmanager
def recorded_run(experiment: Path, prefix: str = "") -> Iterator[None]:
    """Record this process, and mark what it starts, as long as the block lasts."""
    mark = uuid.uuid4().hex
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    file = _record(mark, f"run {experiment}", prefix, os.getpid(), "ajet")
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        file.unlink(missing_ok=True)


@contextmanager
def start_service(name: str, prefix: str = "") -> Iterator[None]:
    """Start `$NAME_SCRIPT` in `$NAME_PATH`, and end it with the block."""
    variable = re.sub(r"\W", "_", name).upper()
    folder, script = os.environ.get(f"{variable}_PATH"), os.environ.get(f"{variable}_SCRIPT")
    for what, value in ((f"{variable}_PATH", folder), (f"{variable}_SCRIPT", script)):
        if not value:
            raise ServiceError(
                f"--with-{name}: the environment variable {what} is not set\n"
                f"    export {variable}_PATH=/folder/of/the/service {variable}_SCRIPT='bash start.sh'"
            )
    assert folder is not None and script is not None
    if not Path(folder).is_dir():
        raise ServiceError(f"--with-{name}: {variable}_PATH={folder} is no folder")
    with start_command(name, ["bash", "-c", script], cwd=Path(folder), prefix=prefix):
        yield


@contextmanager
def start_command(name: str, command: list[str], *, cwd: Path | None = None, prefix: str = "") -> Iterator[Path]:
    """Start a recorded process, give its log file, and end the process and its children with the block."""
    mark = uuid.uuid4().hex
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / f"{prefix}{name}-{mark[:8]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    file = _record(mark, name, prefix, process.pid, shlex.join(command))
    try:
        time.sleep(0.2)  # a script that can't start at all ends within this
        if process.poll() not in (None, 0):
            lines = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise ServiceError(f"{name} ended at once with exit code {process.returncode}\n    " + "\n    ".join(lines))
        print(f"started {prefix}{name} (pid {process.pid}, log {log})", flush=True)
        yield log
    finally:
        _end({mark}, {process.pid: start_time(process.pid)}, SERVICE_PATIENCE_S)
        process.poll()
        file.unlink(missing_ok=True)


def end_recorded(prefix: str = "") -> list[str]:
    """End what is recorded (with a prefix: only what has it), and say what was done."""
    said = []
    for file in sorted(state_folder().glob("*.json")):
        record = _read(file)
        if record is None or record.host != socket.gethostname():
            continue
        if record.boot != _boot():
            file.unlink(missing_ok=True)
            continue
        if (prefix and record.prefix != prefix) or record.pid == os.getpid():
            continue
        ended = _end({record.id}, {record.pid: record.started}, PATIENCE_S)
        file.unlink(missing_ok=True)
        if ended:
            said.append(f"ended {record.prefix}{record.name} ({ended} process{'es' if ended > 1 else ''})")
    return said or ["nothing that ajet started is still running"]


def still_running() -> list[str]:
    """The names of recorded processes that are alive."""
    records = [record for file in sorted(state_folder().glob("*.json")) if (record := _read(file)) is not None]
    here = [record for record in records if record.host == socket.gethostname() and record.boot == _boot()]
    return [f"{record.prefix}{record.name}" for record in here if start_time(record.pid) == record.started]


def _read(file: Path) -> Record | None:
    try:
        return Record(**json.loads(file.read_text()))
    except FileNotFoundError:  # its process removed it meanwhile
        return None
    except (ValueError, TypeError):
        file.unlink(missing_ok=True)
        return None


def _end(marks: set[str], leaders: dict[int, int | None], patience_s: float) -> int:
    """Ask the leaders and all that carry a mark to end, then force them. Returns how many there were."""
    targets = {pid: started for pid, started in leaders.items() if started is not None and start_time(pid) == started}
    everyone = dict(targets)
    # the leader first: it ends its own children in order
    for chosen, wait_s in ((targets, patience_s), ({}, patience_s / 2)):
        alive = {**chosen, **(_marked(marks) if not chosen else {})}
        everyone |= alive
        _signal(alive, signal.SIGTERM)
        _await_end(alive, wait_s)
    rest = {**_alive(targets), **_marked(marks)}
    _signal(rest, signal.SIGKILL)
    _await_end(rest, 2.0)
    return len(everyone)


def _marked(marks: set[str]) -> dict[int, int]:
    """Processes of this user whose environment carries one of the marks."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        started = start_time(int(entry.name))
        try:
            carries = started is not None and wanted & set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:  # another user's process, or one that just ended
            continue
        if carries and started is not None:
            found[int(entry.name)] = started
    return found


def _alive(processes: dict[int, int]) -> dict[int, int]:
    return {pid: started for pid, started in processes.items() if start_time(pid) == started}


def _signal(processes: dict[int, int], number: int) -> None:
    for pid in _alive(processes):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _await_end(processes: dict[int, int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while _alive(processes) and time.monotonic() < until:
        time.sleep(0.05)
