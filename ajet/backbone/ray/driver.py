"""What a driver, the child that conducts a run on Ray, does first."""

from __future__ import annotations

import ctypes
import os
import signal

from ajet.backbone.ray.ray_start import PR_SET_PDEATHSIG


def die_with_parent() -> None:
    """Be killed when the launcher ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
