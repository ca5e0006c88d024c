"""Metrics that a child writes, one line `{"step", "data"}` a time, read while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class MetricsTail:
    """Reads a JSONL file as it grows. A line that is still being written waits for its end.

    `translate` gives metrics the names that every backbone uses.
    """

    def __init__(self, path: Path, translate: Callable[[dict[str, Any]], dict[str, float]]) -> None:
        self._path = path
        self._translate = translate
        self._offset = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps that have been written since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = json.loads(line)
                yield int(record["step"]), self._translate(record["data"])
