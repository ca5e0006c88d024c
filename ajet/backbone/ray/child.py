"""The child process that trains: started, listened to, ended with everything that it started.

Its metrics become ours as they are written; its death, or its silence, becomes our error with the last thing it said.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ajet.backbone.ray.child_log import ChildLog
from ajet.backbone.ray.failure import BackboneFailedError, last_error
from ajet.backbone.ray.metrics_tail import MetricsTail
from ajet.backbone.ray.processes import MARK, end_all

if TYPE_CHECKING:
    from ajet.backbone.options import LaunchOptions
    from ajet.observe.experiment import ExperimentFolder
    from ajet.observe.progress import Progress

log = logging.getLogger(__name__)

SCRATCH = Path("/tmp")
SCRATCH_NAME = "ajv"
LOOK_S = 0.5
"""Seconds between looks at the child."""
SILENCE_S = 1800.0
"""A child that writes nothing for this long, or for two episode timeouts, hangs."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder with a short path (Ray puts sockets into it, whose paths are limited), gone afterwards."""
    remove_abandoned(SCRATCH)
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_NAME}{os.getpid()}_", dir=SCRATCH))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(place: Path) -> None:
    """Remove the private folders of launchers that were killed: their names hold the process id."""
    for folder in place.glob(f"{SCRATCH_NAME}*_*"):
        pid = folder.name.removeprefix(SCRATCH_NAME).partition("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_progress(options: LaunchOptions | None) -> Iterator[Progress]:
    from ajet.observe.progress import Progress, ProgressMode

    mode = ProgressMode.AUTO
    if options is not None and options.json:
        mode = ProgressMode.JSON
    elif options is not None and options.quiet:
        mode = ProgressMode.QUIET
    with Progress.create(mode) as progress:
        yield progress


class Child(NamedTuple):
    """A driver that runs."""

    name: str
    """What it trains with, for messages."""
    process: subprocess.Popen[bytes]
    output: ChildLog
    log: Path


@contextmanager
def started_child(
    name: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    payload: str,
    mask: Callable[[str], str],
) -> Iterator[Child]:
    """`python -m …`, its output copied to `log`. It and its own children end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**environment, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = ChildLog(process, log, payload=payload, mask=mask)
    try:
        yield Child(name, process, output, log)
    finally:
        end_all(environment[MARK], session=process.pid)
        process.wait()
        output.finish()


class Source(NamedTuple):
    """Where metrics come from."""

    tail: MetricsTail
    ends_step: bool
    """Whether its lines say that a step has ended; the others add to what is known of it."""


def watch(
    child: Child, sources: Sequence[Source], experiment: ExperimentFolder, progress: Progress, *, silence_s: float
) -> int:
    """Pass metrics on until the child ends; its exit code."""
    known: dict[int, dict[str, float]] = {}
    while True:
        code = child.process.poll()
        for source in sources:
            for step, metrics in source.tail:
                experiment.metrics.log(step, metrics)
                known.setdefault(step, {}).update(metrics)
                if source.ends_step:
                    progress.step(step, known.pop(step))
        if code is not None:
            return code
        if time.monotonic() - child.output.spoke > silence_s:
            raise BackboneFailedError(
                f"{child.name} has said nothing for {silence_s:.0f} s and was stopped; its last error: "
                f"{last_error(child.log)}\n    its log: {child.log}"
            )
        time.sleep(LOOK_S)


def keep_weights(source: Path, target: Path) -> None:
    """Copy weights in Hugging Face form to where every backbone leaves the newest."""
    if not source.is_dir():
        return
    scratch = target.with_name(target.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
