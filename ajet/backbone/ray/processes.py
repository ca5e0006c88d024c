"""Ending everything that a run started, and nothing else.

Whatever the run starts inherits a mark in its environment: Ray's daemons and workers, vLLM's processes and theirs. So
orphans whose parents are gone are found too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "AJET_RAY_RUN"
"""Environment variable that names the run a process belongs to."""
PATIENCE_S = 8.0
"""How long processes may take to end by themselves before they are killed."""


def of_run(mark: str, session: int | None = None) -> list[int]:
    """Processes of this user that carry the mark or belong to the session, zombies left out.

    A process that gives itself a title, as Ray's do, may write it over its mark. It stays in its session.
    """
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if _lives_in(entry, session) or wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # another user's process, or one that just ended
            continue
    return found


def _lives_in(entry: Path, session: int | None) -> bool:
    if session is None:
        return False
    state, _parent, _group, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
    return int(its_session) == session and state != "Z"


def end_all(mark: str, patience_s: float = PATIENCE_S, *, session: int | None = None) -> int:
    """Ask all of these processes to end, then kill what is left. Returns how many there were."""
    everyone = set(of_run(mark, session))
    _signal(everyone, signal.SIGTERM)
    until = time.monotonic() + patience_s
    while of_run(mark, session) and time.monotonic() < until:
        time.sleep(0.1)
    until = time.monotonic() + patience_s
    while (left := of_run(mark, session)) and time.monotonic() < until:
        everyone |= set(left)
        _signal(left, signal.SIGKILL)
        time.sleep(0.1)
    return len(everyone)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
