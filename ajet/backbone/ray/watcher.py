"""The driver's process, watched: started, listened to, and ended with everything it started; and why it failed.

Its metrics are passed on as they are written. Its death or its silence becomes our error, with the last one in its log.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.backbone.failures import GapWatch, warn_of
from ajet.observe.logs import LOST, TRACEBACK
from ajet.schema.errors import AjetError
from ajet.system.processes import RAY_RUN, end_all

if TYPE_CHECKING:
    from ajet.observe.experiment import ExperimentFolder
    from ajet.observe.progress import Progress

TAIL_BYTES = 512 * 1024
_PREFIX = re.compile(r"^\x1b\[[0-9;]*m?\(.*?pid=\d+.*?\)\x1b\[0m ?|^\(.*?pid=\d+.*?\) ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:[\w.]+\.)?([A-Z]?\w*(?:Error|Exception|Exit|Interrupt|Fault|Died|Timeout))(?::|$)\s*(.*)")
_WRAPPERS = ("RayTaskError", "RaySystemError")


class BackboneFailedError(AjetError):
    """verl or Trinity ended with an error, or made no progress. Carries the last error of its log."""


def last_error(log: Path) -> str:
    """The last exception in the log; without one, its last lines."""
    lines = _tail(log)
    for index in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[index].strip())
        if match and not match.group(1).startswith(_WRAPPERS):
            return (lines[index].strip() + actor_named(lines[index + 1 : index + 4]))[:2000]
    return "\n".join(lines[-5:]) or "it wrote nothing"


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    plain = (_COLOUR.sub("", _PREFIX.sub("", line)).rstrip() for line in text.replace("\r", "\n").splitlines())
    return [line for line in plain if line]


def first_line(error: BaseException) -> str:
    """The first line of an error's text: Ray's errors go on for many. If an actor couldn't start, the last one, which
    says why."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "in its creation task" in lines[0] else lines[0]


def actor_named(lines: list[str]) -> str:
    """The actor that a death is about, in brackets: one of the lines of Ray's error names it."""
    named = next((line.strip() for line in lines if line.strip().startswith("class_name:")), "")
    return f" ({named.removeprefix('class_name:').strip()})" if named else ""


LOOK_S = 0.5
SILENCE_S = 1800.0
"""A driver that writes nothing for this long, or for two episode timeouts, hangs."""
LACKS = re.compile(r"No available node types can fulfill resource request .*?(\{.*?\})")
"""What Ray says every half a minute while nothing can go on, because no machine has so many logical CPUs or GPUs."""
LEFT_OUT = "(the run, encoded)"
"""Stands in the log in place of our payload."""


@contextmanager
def started_child(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    payload: str,
    mask: Callable[[str], str],
) -> Iterator[ChildLog]:
    """`python -m …`, its output copied to `log`. It and its own children end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**environment, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    child = ChildLog(process, log, payload=payload, mask=mask)
    try:
        yield child
    finally:
        end_all(RAY_RUN, environment[RAY_RUN], session=process.pid)
        process.wait()
        child.finish()


class ChildLog:
    """Copies a child's output into a file, in a thread: secrets masked, our payload left out.

    `spoke` is when the child last wrote something.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], path: Path, *, payload: str, mask: Callable[[str], str]
    ) -> None:
        self.spoke = time.monotonic()
        self.process = process
        self.path = path
        self._payload = payload
        self._mask = mask
        self._thread = threading.Thread(target=self._copy, name="driver-log", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Return when all of it is in the file. The child and what it started have ended."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with self.path.open("a", encoding="utf-8") as file:
            for raw in self.process.stdout:
                line = raw.decode(errors="replace")
                if (lacks := LACKS.search(line)) is None:
                    self.spoke = time.monotonic()
                else:
                    logging.getLogger(__name__).warning(
                        "no machine of this Ray has %s, without which the run can't go on: start one with more CPUs "
                        "(ray start --head --num-cpus=N; N may exceed the cores), and name it with --ray-address",
                        lacks.group(1),
                    )
                if self._payload:
                    line = line.replace(self._payload, LEFT_OUT)
                file.write(self._mask(line))
                file.flush()


class Tail:
    """Reads a JSONL file as it grows. A line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What was written since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                yield json.loads(line)


LIBRARIES = ("ray", "transfer_queue", "trinity", "verl")
"""Their warnings are in their own log alone."""


class WarningRelay(logging.Handler):
    """Appends a process's warnings and errors to a file, for `log_relayed`."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in LIBRARIES:
            return
        traceback = getattr(record, TRACEBACK, "")
        if record.exc_info:
            traceback = logging.Formatter().formatException(record.exc_info)
        names = ("name", "levelno", "levelname", "msg", "args", LOST)
        kept = {name: getattr(record, name) for name in names if hasattr(record, name)}
        line = json.dumps(kept | {TRACEBACK: traceback}, default=str) + "\n"
        try:
            with self._path.open("ab", buffering=0) as file:  # in one write: several processes append to it
                file.write(line.encode())
        except OSError:
            self.handleError(record)


def log_relayed(warnings: Tail) -> None:
    """Log what came from a run's processes since the last look, as if it were this process's own."""
    for kept in warnings:
        args = kept["args"]
        record = logging.makeLogRecord(kept | {"args": tuple(args) if isinstance(args, list) else args})
        logging.getLogger(record.name).handle(record)


class Source(NamedTuple):
    """A file that metrics come from, in lines of `{"step", "data"}`."""

    tail: Tail
    translate: Callable[[dict[str, Any]], dict[str, float]]
    """Gives metrics the names that every backbone shares."""
    ends_step: bool
    """Whether its lines mean that a step has ended; the others add to what is known of it."""


def watch(
    title: str,
    child: ChildLog,
    sources: Sequence[Source],
    warnings: Tail,
    experiment: ExperimentFolder,
    progress: Progress,
    gap: GapWatch,
    *,
    silence_s: float,
) -> int:
    """Pass metrics and warnings on until the child ends. Returns its exit code."""
    known: dict[int, dict[str, float]] = {}
    while True:
        code = child.process.poll()
        log_relayed(warnings)
        for source in sources:
            for record in source.tail:
                step, metrics = int(record["step"]), source.translate(record["data"])
                experiment.metrics.log(step, metrics)
                warn_of(step, metrics)
                known.setdefault(step, {}).update(metrics)
                gap.look_at(step, known[step])
                if source.ends_step:
                    progress.step(step, known.pop(step))
        if code is not None:
            return code
        if time.monotonic() - child.spoke > silence_s:
            raise BackboneFailedError(
                f"{title} wrote nothing for {silence_s:.0f} s and was stopped; its last error: "
                f"{last_error(child.path)}\n    its log: {child.path}"
            )
        time.sleep(LOOK_S)
