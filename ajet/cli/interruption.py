"""`interruption`: until when a command serves."""

from __future__ import annotations

import asyncio
import signal


def interruption() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM, which from now on do nothing else."""
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    return interrupted
