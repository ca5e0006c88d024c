"""`seccomp_filter`: the system calls that no command of a sandbox may make, as a program for the kernel.

What a program needs to compute, to read files and to start others is allowed. What changes the machine, looks into
other processes, makes namespaces or speaks to the host past the network namespace (vsock) answers "not permitted".
Classic BPF, generated here: a handful of instructions, and no library to load.
"""

from __future__ import annotations

import platform
import struct
from typing import Any

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


def seccomp_filter(*, counted_by_cgroup: bool, machine: str | None = None) -> bytes | None:
    """The program, as the kernel takes it. None: there is none for this processor."""
    machine = machine or platform.machine()
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
