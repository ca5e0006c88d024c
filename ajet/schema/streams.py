"""`is_stream`: whether what a user names as a file to write is a pipe or a device. Those are written to, not replaced.

As root, a file put in the place of `/dev/stdout` or `/dev/null` would be there for the whole machine.
"""

from __future__ import annotations

from pathlib import Path


def is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
