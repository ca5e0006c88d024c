"""`LineFile`: a file that grows by whole lines, and outlives a full disk: what could not be written is written later.

A line that a kill or a full disk cut off stays alone: the next one begins on a line of its own. `whole_record` reads
one. `open_regular` and `read_regular` read what may come from somebody else: a run's folder can be anybody's.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ajet.schema.errors import UserError

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Lines that wait for room on the disk; further ones are lost."""
MOST_BYTES = 64 * 2**20
"""Of a file that is read whole. Configs, notes and states are thousands of times smaller."""


class UnreadableFileError(UserError, OSError):
    """A file of a run's folder that no run writes: a link, a pipe, a device, or far too large."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file: no link is followed, and no pipe is waited for. Raises `FileNotFoundError` and
    `UnreadableFileError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableFileError(f"{path} can't be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnreadableFileError(f"{path} is not a regular file, which a run would have written: move it away")
    return os.fdopen(handle, "rb")


def open_text(path: Path) -> TextIO:
    """The same, as text. What isn't UTF-8 is replaced."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace", newline="\n")


def read_regular(path: Path) -> str:
    """The text of a regular file, of a bounded size."""
    with open_text(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise UnreadableFileError(f"{path} has {size:,} bytes, and at most {MOST_BYTES:,} are read: move it away")
        return file.read()


class LineFile:
    """Appends lines, for one thread at a time. The file is opened for each line, so it may be replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[str] = []

    def write(self, line: str) -> None:
        """Append a line, which ends in a line break. It is in the file when this returns, unless the disk is full."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(line)
        self._flush()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._waiting:
            log.error("%s lacks its last %d lines", self._path, len(self._waiting))

    def _flush(self) -> None:
        text = "".join(self._waiting).encode()
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                self._append(handle, text)
            finally:
                os.close(handle)
        except OSError as error:
            log.warning("%s can't be written (%s): trying again later", self._path, error.strerror)
        else:
            self._waiting.clear()

    @staticmethod
    def _append(handle: int, text: bytes) -> None:
        """Append all of the text, or nothing."""
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            written = os.write(handle, text)
            while written < len(text):
                written += os.write(handle, text[written:])
        except OSError:
            os.ftruncate(handle, size)
            raise


def whole_record(line: str) -> dict[str, Any] | None:
    """The JSON object on a line, or None if the line was cut off or is still being written."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def unreadable_lines(path: Path) -> list[int]:
    """The numbers, from 1, of the lines that aren't a JSON object, except a last line that is still being written."""
    if not path.exists():
        return []
    with open_text(path) as file:
        return [number for number, line in enumerate(file, 1) if line.endswith("\n") and whole_record(line) is None]
