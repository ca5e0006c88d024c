"""What went wrong in a child that trains, out of its log."""

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
    """The last exception that the log names; else its last lines."""
    lines = _tail(log)
    for index in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[index].strip())
        if match and not match.group(1).startswith(_WRAPPERS):
            return (lines[index].strip() + _who(lines[index + 1 : index + 4]))[:2000]
    return "\n".join(lines[-5:]) or "it wrote nothing"


def _who(lines: list[str]) -> str:
    """Which actor an error of Ray's is about: it says so in the lines that follow."""
    named = next((line.strip() for line in lines if line.strip().startswith("class_name:")), "")
    return f" ({named.removeprefix('class_name:').strip()})" if named else ""


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    plain = (_COLOUR.sub("", _PREFIX.sub("", line)).rstrip() for line in text.replace("\r", "\n").splitlines())
    return [line for line in plain if line]
