"""`FileMonitor`: Trinity's metrics as JSON lines. The launcher reads them, and passes them on to the trackers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from trinity.common.constants import TRAINER_NAME
from trinity.utils.monitor import Monitor


class FileMonitor(Monitor):  # type: ignore[misc]
    """One file per role: `explorer.jsonl`, `trainer.jsonl`."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project, name, role, config)
        self._file = Path(config.monitor.monitor_args["folder"]) / f"{role}.jsonl"
        self._role = role
        self._since = time.monotonic()

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """One line. Explorer and trainer write files of their own."""
        numbers = {key: float(value) for key, value in data.items() if isinstance(value, int | float | np.number)}
        if self._role == TRAINER_NAME:  # it logs once per step
            numbers["time/step"], self._since = time.monotonic() - self._since, time.monotonic()
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "data": numbers}) + "\n")

    def close(self) -> None:
        """Nothing is held open."""
