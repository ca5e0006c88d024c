"""`place_advice`: a file or folder that can't be written or read, said in one message with the way out."""

from __future__ import annotations

import errno
import os

ADVICE = {
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.ENOSPC: "make room, or choose a place on another disk",
    errno.EDQUOT: "make room, or choose a place on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "one of these folders is a file: choose another place",
    errno.EISDIR: "this is a folder: name a file",
    errno.ELOOP: "its links lead in a circle: choose another place",
}
"""What the user can do about an operating system's refusal."""


def place_advice(error: BaseException) -> str | None:
    """The message, or None if the error is none of these or says no place."""
    if not isinstance(error, OSError) or error.errno not in ADVICE or error.filename is None:
        return None
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    shown = place if len(place) <= 200 else f"{place[:100]}…{place[-60:]}"
    return f"{shown}: {error.strerror}\n    {ADVICE[error.errno]}"
