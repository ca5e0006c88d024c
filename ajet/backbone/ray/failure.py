"""What went wrong in a run on Ray: from the driver's log, or from one of Ray's errors."""

from __future__ import annotations

import re
from pathlib import Path

from ajet.schema.errors import AjetError

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
    """The first line of an error's text: Ray's errors go on for many."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def cause(error: BaseException) -> str:
    """What an actor raised: Ray wraps it."""
    inner = getattr(error, "cause", None)
    text = f"{type(inner).__name__}: {inner}" if isinstance(inner, BaseException) else str(error)
    return text.strip()[:2000]


def actor_named(lines: list[str]) -> str:
    """The actor that a death is about, in brackets: one of the lines of Ray's error names it."""
    named = next((line.strip() for line in lines if line.strip().startswith("class_name:")), "")
    return f" ({named.removeprefix('class_name:').strip()})" if named else ""
