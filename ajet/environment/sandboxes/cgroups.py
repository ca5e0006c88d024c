"""`Cgroup`: the kernel's own account of a sandbox's memory, processes and CPU time, where it can be written.

A sandbox's group lies below this process's own, so it never gets more than this process has. Version 1 (a folder per
controller) and 2 are both read. Where no group can be made, `Cgroup.create` returns None, and the sandbox falls back to
limits per process and a watcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "ajet-sandbox-"
CONTROLLERS = ("memory", "pids", "cpu")
_NAME = re.compile(PREFIX + r"(?P<process>\d{1,9})-(?P<since>\d+)-\d+")
"""What `Cgroup.create` names a group. One of another form has another maker, and is left alone."""
PERIOD_US = 100_000
REMOVE_S = 2.0
"""How long the kernel may take to give a group free after its last process has ended."""

_numbers = itertools.count(1)


class Cgroup:
    """One group: a folder (version 2), or one per controller (version 1)."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders

    @classmethod
    def create(cls, *, memory_mb: int, processes: int, cpus: float) -> Cgroup | None:
        """Make a group with these limits. None: cgroups can't be written here."""
        number = next(_numbers)
        if number == 1:
            sweep()
        name = f"{PREFIX}{os.getpid()}-{started(os.getpid())}-{number}"
        made: dict[str, Path] = {}
        try:
            for controller, parent in _parents().items():
                folder = parent / name
                folder.mkdir(exist_ok=True)
                made[controller] = folder
            if set(made) != set(CONTROLLERS):
                raise OSError("not every controller is here")
            _set_limits(made, memory_mb << 20, processes, cpus)
        except OSError:
            for folder in set(made.values()):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            return None
        return cls(made)

    @property
    def files(self) -> list[str]:
        """Writing 0 to each of these moves the writer into the group."""
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys(self._folders.values())]

    def out_of_memory(self) -> int:
        """How many processes the memory limit has ended."""
        folder = self._folders["memory"]
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (folder / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0

    def remove(self) -> None:
        """Remove the group, whose processes have ended. Waits a little for the kernel to notice."""
        for folder in dict.fromkeys(self._folders.values()):
            _remove(folder, time.monotonic() + REMOVE_S)


def sweep() -> int:
    """Remove groups whose owners were killed. Returns how many there were."""
    swept = 0
    for parent in dict.fromkeys(_parents().values()):
        for folder in parent.glob(f"{PREFIX}*"):
            owner = _NAME.fullmatch(folder.name)
            if owner is not None and started(int(owner["process"])) != int(owner["since"]):
                swept += _remove(folder, time.monotonic() + 0.1)
    return swept


def _remove(folder: Path, give_up: float) -> bool:
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return False
        except OSError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.005)
        else:
            return True


def started(process: int) -> int:
    """When a process started, in clock ticks: with its number, that names it for good. 0: there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _parents() -> dict[str, Path]:
    """This process's own folder for each controller."""
    mounts: dict[str, Path] = {}
    unified: Path | None = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        place = Path(left.split()[4])
        if kind == "cgroup2":
            unified = place
        elif kind == "cgroup":
            mounts.update({name: place for name in options.split(",") if name in CONTROLLERS})
    paths = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found: dict[str, Path] = {}
    for _, names, path in paths:
        for name in names.split(","):
            if name in mounts:
                found[name] = _inside(mounts[name], path)
    own = next((path for number, names, path in paths if number == "0" and not names), None)
    if unified is not None and own is not None and not found:
        folder = _inside(unified, own)
        enabled = _read(folder / "cgroup.subtree_control").split()
        if not set(CONTROLLERS) <= set(enabled):
            with contextlib.suppress(OSError):  # it holds processes of its own, or is not ours
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
            enabled = _read(folder / "cgroup.subtree_control").split()
        found = {name: folder for name in CONTROLLERS if name in enabled}
    return found


def _inside(mount: Path, path: str) -> Path:
    """A group's folder; in a container the path may be as seen from outside, and the mount is the group itself."""
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _set_limits(folders: Mapping[str, Path], memory: int, processes: int, cpus: float) -> None:
    quota = max(1000, int(cpus * PERIOD_US))
    memory_folder, pids, cpu = (folders[name] for name in CONTROLLERS)
    (pids / "pids.max").write_text(str(processes))
    if (memory_folder / "memory.max").exists():  # version 2
        (memory_folder / "memory.max").write_text(str(memory))
        with contextlib.suppress(OSError):  # no swap here
            (memory_folder / "memory.swap.max").write_text("0")
        (cpu / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        return
    (memory_folder / "memory.limit_in_bytes").write_text(str(memory))
    with contextlib.suppress(OSError):  # swap isn't accounted for here
        (memory_folder / "memory.memsw.limit_in_bytes").write_text(str(memory))
    (cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (cpu / "cpu.cfs_quota_us").write_text(str(quota))
