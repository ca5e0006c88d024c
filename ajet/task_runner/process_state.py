"""`ProcessState`: what all threads of a process share and a workflow may change: noticed at the end of each episode,
put back, and named in the log. Workers of `multi-processing` have a process of their own and can't harm others so.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

log = logging.getLogger(__name__)

ISOLATION = "ajet.task_runner.wrapper_type: multi-processing gives each workflow a process of its own"


class ProcessState:
    """As it was when it was made."""

    def __init__(self) -> None:
        self._folder = _working_folder()
        self._timeout = socket.getdefaulttimeout()
        self._recursion = sys.getrecursionlimit()
        self._disabled = logging.root.manager.disable

    def restore(self, name: str) -> list[str]:
        """Put back what has changed. `name`: of the thread whose episode has just ended. Returns what it was."""
        changed = []
        if (folder := _working_folder()) != self._folder and self._folder is not None:
            os.chdir(self._folder)
            changed.append(f"the working directory (to {folder or 'one that is gone'})")
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            if getattr(getattr(sys, stream), "closed", False):
                setattr(sys, stream, open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
                changed.append(f"sys.{stream} (closed)")
        if (timeout := socket.getdefaulttimeout()) != self._timeout:
            socket.setdefaulttimeout(self._timeout)
            changed.append(f"the sockets' default timeout (to {timeout})")
        if (limit := sys.getrecursionlimit()) < self._recursion:
            sys.setrecursionlimit(self._recursion)
            changed.append(f"the recursion limit (to {limit})")
        if (level := logging.root.manager.disable) > self._disabled:
            logging.disable(self._disabled)
            changed.append(f"logging (disabled up to level {level})")
        if changed:
            log.warning(
                "a workflow changed what all episodes of this process share: %s. It is put back. It was %s, or one "
                "beside it; %s",
                ", ".join(changed),
                name,
                ISOLATION,
            )
        return changed


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None
