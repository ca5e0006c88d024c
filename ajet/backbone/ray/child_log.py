"""The child's output, written to the run's log as it comes: secrets masked, our own payload left out."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

LEFT_OUT = "(the run, encoded)"


class ChildLog:
    """Copies a child's output into a file, in a thread. `spoke` is when it last said something."""

    def __init__(self, child: subprocess.Popen[bytes], path: Path, *, payload: str, mask: Callable[[str], str]) -> None:
        self.spoke = time.monotonic()
        self._child = child
        self._path = path
        self._payload = payload
        self._mask = mask
        self._thread = threading.Thread(target=self._copy, name="verl-log", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Return when all of it is in the file. The child and what it started have ended."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        assert self._child.stdout is not None
        with self._path.open("a", encoding="utf-8") as file:
            for raw in self._child.stdout:
                self.spoke = time.monotonic()
                line = raw.decode(errors="replace")
                if self._payload:
                    line = line.replace(self._payload, LEFT_OUT)
                file.write(self._mask(line))
                file.flush()
