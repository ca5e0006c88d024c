"""Processes that run beside a run and end with it: `--with-NAME` services, and the viewer of `--with-logview`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ajet.runtime.processes import STARTED_BY, end_all, recorded, state_folder
from ajet.schema.errors import UserError

PATIENCE_S = 5.0
"""How long a companion may take to end by itself: less than Ctrl-C promises for the run."""


class ServiceError(UserError):
    """A `--with-NAME` service that can't be started."""


@contextmanager
def start_service(name: str, prefix: str = "") -> Iterator[None]:
    """Start `$NAME_SCRIPT` in `$NAME_PATH`, and end it with the block."""
    variable = re.sub(r"\W", "_", name).upper()
    folder, script = os.environ.get(f"{variable}_PATH"), os.environ.get(f"{variable}_SCRIPT")
    for what, value in ((f"{variable}_PATH", folder), (f"{variable}_SCRIPT", script)):
        if not value:
            raise ServiceError(
                f"--with-{name}: the environment variable {what} is not set\n"
                f"    export {variable}_PATH=/folder/of/the/service {variable}_SCRIPT='bash start.sh'"
            )
    assert folder is not None and script is not None
    if not Path(folder).is_dir():
        raise ServiceError(f"--with-{name}: {variable}_PATH={folder} is not a folder")
    with start_command(name, ["bash", "-c", script], cwd=Path(folder), prefix=prefix):
        yield


@contextmanager
def start_command(name: str, command: list[str], *, cwd: Path | None = None, prefix: str = "") -> Iterator[Path]:
    """Start a recorded process, yield its log file, and end the process and its children with the block."""
    mark = uuid.uuid4().hex
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / f"{prefix}{name}-{mark[:8]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, STARTED_BY: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    leader = psutil.Process(process.pid)  # not reaped yet, so its id is still its own
    with recorded(mark, name, prefix, process.pid, shlex.join(command)):
        try:
            time.sleep(0.2)  # long enough for a script that can't start at all to end
            if process.poll() not in (None, 0):
                lines = "\n    ".join(log.read_text(errors="replace").strip().splitlines()[-5:])
                raise ServiceError(f"{name} ended immediately with exit code {process.returncode}\n    {lines}")
            print(f"started {prefix}{name} (pid {process.pid}, log {log})", flush=True)
            yield log
        finally:
            end_all(STARTED_BY, mark, PATIENCE_S, leader=leader)
            process.poll()
