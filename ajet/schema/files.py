"""How files are written: whole or not at all, and as lines of JSON that any program can read."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_NUMBER_BITS = 14_000
"""Python converts numbers of up to 4,300 decimal digits."""


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file whole or not at all, also where several threads and processes write it. Makes its folder if needed.

    `durable`: it is on the disk afterwards. Raises OSError, which names the file; the one before is then kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        scratch.unlink(missing_ok=True)  # left by a kill, or somebody's link to elsewhere
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        # a full disk names no file, and all else the scratch file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # where it could not be made, as on a read-only disk
            scratch.unlink(missing_ok=True)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, which is written to as it is."""
    return path.exists() and not path.is_file() and not path.is_dir()


def json_line(record: dict[str, Any], *, ascii_only: bool = False) -> str:
    """A record as a line of JSON that any program can read."""
    try:
        return json.dumps(record, ensure_ascii=ascii_only, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_readable(record), ensure_ascii=ascii_only) + "\n"


def _readable(value: Any) -> Any:
    """JSON has no NaN and no infinity, and Python reads no number of thousands of digits: such a one becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if value.bit_length() <= LONGEST_NUMBER_BITS else hex(value)
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value
