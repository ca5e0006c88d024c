"""`events.jsonl`: what happened to a run (started, resumed, checkpoint, failed, ended), one JSON line each."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from ajet.observe.secrets import Masker


class EventLog:
    """Appends events; each is on the disk when `write` returns. Any thread may write."""

    def __init__(self, path: Path, masker: Masker | None = None) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._masker = masker or Masker()

    def write(self, kind: str, **fields: Any) -> None:
        """Add an event. Fields are JSON values; secrets in them are masked."""
        record = {"time": round(time.time(), 3), "event": kind, **self._masker.value(fields)}
        with self._lock:
            self._file.write(json.dumps(record, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a file; a last line that is still being written is left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
