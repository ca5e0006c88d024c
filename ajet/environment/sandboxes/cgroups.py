"""What the kernel enforces around a sandbox: `Cgroup` limits its resources, `seccomp_filter` its system calls.

A sandbox's group lies below this process's own, so it never gets more than this process has. Version 1 (a folder per
controller) and 2 are both read. Where no group can be made, `Cgroup.create` returns None, and the sandbox falls back to
limits per process and a watcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

    def remove(self) -> None:
        """Remove the group, whose processes have ended. Waits a little for the kernel to notice."""
        for folder in dict.fromkeys(self._folders.values()):
            _remove(folder, time.monotonic() + REMOVE_S)


def sweep() -> None:
    """Remove groups whose owners were killed."""
    for parent in dict.fromkeys(_parents().values()):
        for folder in parent.glob(f"{PREFIX}*"):
            owner = _NAME.fullmatch(folder.name)
            if owner is not None and started(int(owner["process"])) != int(owner["since"]):
                _remove(folder, time.monotonic() + 0.1)


def _remove(folder: Path, give_up: float) -> None:
    while folder.exists() and time.monotonic() < give_up:
        with contextlib.suppress(OSError):  # the kernel has not yet noticed that its last process has ended
            folder.rmdir()
            return
        time.sleep(0.005)


def started(process: int) -> int:
    """When a process started, in clock ticks: with its number, that names it for good. 0: there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def owner() -> dict[str, Any]:
    """This process, as what it makes names it."""
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started(os.getpid())}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether this process of this machine has ended. Of other machines, nothing is known."""
    return bool(owner["host"] == socket.gethostname() and started(owner["process"]) != owner["started"])


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


_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_USER_NAMESPACE = 0x10000000
_X32 = 0x40000000
_FAMILIES = (1, 2, 10, 16)
"""Sockets that may be made: UNIX, IPv4, IPv6, netlink (without privileges it only lists interfaces)."""

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # name: its number on x86_64, on aarch64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}

_UNCOUNTED: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
"""Memory that belongs to no process: refused where no cgroup counts it."""

_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)


def container_profile() -> dict[str, Any]:
    """The same rules in the form that Docker and Podman take. Docker's own, in some versions, let vsock through."""

    def refuse(names: list[str], error: int = _EPERM, **argument: Any) -> dict[str, Any]:
        arguments = [{"index": 0, **argument}] if argument else []
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": arguments}

    flag = _NEW_USER_NAMESPACE
    new_user: dict[str, Any] = {"op": "SCMP_CMP_MASKED_EQ", "value": flag, "valueTwo": flag}
    families = [family for family in range(64) if family not in _FAMILIES]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            refuse(sorted(_REFUSED)),
            refuse(["clone3"], _ENOSYS),
            refuse(["clone"], **new_user),
            *(refuse(["socket", "socketpair"], op="SCMP_CMP_EQ", value=family) for family in families),
        ],
    }


def seccomp_filter(*, counted_by_cgroup: bool) -> bytes | None:
    """The program, as the kernel takes it. None: there is none for this processor."""
    machine = platform.machine()
    audit = _AUDIT_ARCHITECTURE.get(machine)
    if audit is None:
        return None
    column = 0 if machine == "x86_64" else 1
    refused = {**_REFUSED, **({} if counted_by_cgroup else _UNCOUNTED)}
    numbers = sorted(number for pair in refused.values() if (number := pair[column]) is not None)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # The flags of clone3 lie in memory, which a filter can't read: programs fall back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_USER_NAMESPACE),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    families = [(_EQUAL, len(_FAMILIES) - position, 0, family) for position, family in enumerate(_FAMILIES)]
    program += [
        (_EQUAL, 1, 0, _SOCKET[column]),
        (_EQUAL, 0, len(families) + 3, _SOCKETPAIR[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *families,
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
