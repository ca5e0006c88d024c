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


def marked(mark: str) -> list[int]:
    """Processes of this user that carry the mark, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # another user's process, or one that just ended
            continue
    return found


def end_all(mark: str, patience_s: float = PATIENCE_S) -> int:
    """Ask all marked processes to end, then kill what is left. Returns how many there were."""
    everyone = set(marked(mark))
    _signal(everyone, signal.SIGTERM)
    until = time.monotonic() + patience_s
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.1)
    until = time.monotonic() + patience_s
    while (left := marked(mark)) and time.monotonic() < until:
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
