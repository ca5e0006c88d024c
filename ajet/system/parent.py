"""How a process of ours ends with the one that started it, however that ends (Linux's PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_BECOME = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def die_with(parent: int) -> None:
    """From now on, the kernel kills this process when its parent ends; it ends now if its parent is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we said that we want to know
        os._exit(1)


def ending_with_us(command: list[str]) -> list[str]:
    """For another's program: the same command, as one that also gets SIGTERM when the thread that starts it is gone."""
    return [sys.executable, "-c", _BECOME, *command]
