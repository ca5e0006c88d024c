"""What every driver does. A driver is the child process that runs verl or Trinity, started by the launcher."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ajet.backbone.ray.start import JOIN_DEADLINE_S
from ajet.schema.errors import AjetError
from ajet.system.processes import die_with

T = TypeVar("T")

RAY_STARTS = 3
SLOW_START = "node timed out during startup"


@dataclass(frozen=True, slots=True)
class DriverInput:
    """What the launcher tells the driver."""

    settings: dict[str, Any]
    """The configuration of verl or Trinity."""
    payload: str
    """`RunPayload.encode()`."""
    ray: dict[str, Any]
    """Arguments of `ray.init`."""
    nodes: int
    """Machines to wait for; 0: none."""
    error_file: str
    """Where the driver writes what went wrong."""

    def write(self, path: Path) -> None:
        """Readable by this user alone."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> DriverInput:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def run_driver(path: str, run: Callable[[DriverInput], None]) -> None:
    """Run what the launcher wrote. An error of ours is handed to the launcher in full."""
    die_with(os.getppid())
    given = DriverInput.read(Path(path))
    try:
        run(given)
    except AjetError as error:
        Path(given.error_file).write_text(str(error), encoding="utf-8")
        raise


def retry_slow_start(start: Callable[[], T]) -> T:
    """Start Ray, again if its daemons were too slow: it allows them 30 s, which a machine under load can exceed."""
    import ray

    for _ in range(RAY_STARTS - 1):
        try:
            return start()
        except Exception as error:
            if SLOW_START not in str(error):
                raise
            ray.shutdown()
    return start()


def wait_for_nodes(nodes: int) -> None:
    """Return when this many machines have joined the cluster that this process is connected to."""
    import ray

    until = time.monotonic() + JOIN_DEADLINE_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < nodes:
        if time.monotonic() > until:
            raise TimeoutError(f"{joined} of {nodes} machines joined the cluster within {JOIN_DEADLINE_S:.0f} s")
        time.sleep(1)
