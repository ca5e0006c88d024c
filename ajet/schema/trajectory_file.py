"""A trajectory as a file that grows with it: JSON lines, one for its beginning, each call and step, and its end.

A line is written whole, at once, and is there even if the process is killed right after. A file whose process was
killed reads as a trajectory that is still running; a torn last line is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ajet.schema.trajectory import ModelCall, Trajectory, TrajectoryFormatError, TrajectoryStep, as_plain

SUFFIX = ".jsonl"
LONGEST_NAME = 200
"""Bytes of a file's name, before its digest and suffix. File systems take 255."""
_GROWING = ("calls", "steps")
_MARK = b'{"trajectory": '
"""How the first line begins: it tells such a file from any other."""


class TrajectoryFile:
    """Appends what is new of one trajectory to its file."""

    def __init__(self, path: Path, trajectory: Trajectory) -> None:
        """Begin the file anew. Raises OSError if it can't be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._trajectory = trajectory
        self._written = {"calls": 0, "steps": 0}
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._append({"trajectory": _without_growing(trajectory)})

    def update(self) -> None:
        """Write the calls and steps that were added since."""
        lines: list[dict[str, Any]] = []
        for kind, items in (("calls", self._trajectory.calls), ("steps", self._trajectory.steps)):
            new = items[self._written[kind] :]
            lines += [{kind.removesuffix("s"): _plain(item)} for item in new]
            self._written[kind] = len(items)
        self._append(*lines)

    def close(self) -> None:
        """Write how it ended."""
        self.update()
        self._append({"end": _without_growing(self._trajectory)})
        os.close(self._file)

    def _append(self, *records: dict[str, Any]) -> None:
        text = "".join(map(_line, records))
        data = memoryview(text.encode("utf-8", "replace"))
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            error.filename = str(self.path)
            raise


def write_trajectory(path: Path, trajectory: Trajectory) -> None:
    """Write a finished trajectory."""
    TrajectoryFile(path, trajectory).close()


def write_end(path: Path, trajectory: Trajectory) -> None:
    """Add to a trajectory's file what became known after its end: its reward, for example."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(_line({"end": _without_growing(trajectory)}))


def read_trajectory(path: Path) -> Trajectory:
    """Read a trajectory's file, also one that is still growing. Raises TrajectoryFormatError with file and line."""
    values: dict[str, Any] = {}
    growing: dict[str, list[Any]] = {"calls": [], "steps": []}
    lines = _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            ((kind, content),) = record.items()
            if kind in ("trajectory", "end"):
                values.update(content)
            else:
                growing[f"{kind}s"].append(content)
        except (ValueError, AttributeError, KeyError, TypeError):
            if number == len(lines) and not line.endswith("\n"):  # torn: the process was killed while it wrote
                break
            raise TrajectoryFormatError(f"{path}:{number}: not a line of a trajectory") from None
    try:
        return Trajectory.from_dict({**values, **growing})
    except TrajectoryFormatError as error:
        raise TrajectoryFormatError(f"{path}: {error}") from None


def is_trajectory_file(path: Path) -> bool:
    """Whether a file begins like a trajectory's."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MARK)) == _MARK
    except OSError:
        return False


def trajectory_files(folder: Path) -> Iterator[Path]:
    """The trajectory files right in a folder, by name."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.glob(f"*{SUFFIX}")) if is_trajectory_file(path))


def file_name(request_id: str) -> str:
    """A file name for a trajectory: its id, or as much of it as file systems take, and its digest."""
    plain = re.sub(r"[^\w.-]+", "_", request_id).strip(".").encode()[:LONGEST_NAME].decode(errors="ignore")
    if plain == request_id:
        return plain + SUFFIX
    return f"{plain}-{hashlib.sha256(request_id.encode(errors='surrogatepass')).hexdigest()[:8]}{SUFFIX}"


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}") from None
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(record), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: other programs could not read the file."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _without_growing(trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory holds besides calls and steps, which have lines of their own."""
    return {key: value for key, value in trajectory.to_dict().items() if key not in _GROWING}


def _plain(item: ModelCall | TrajectoryStep) -> Any:
    return msgspec.to_builtins(item, str_keys=True, enc_hook=as_plain)
