"""Waiting in tests: on a condition, not for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return as soon as the condition holds; fail if it doesn't within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s"
        time.sleep(0.02)


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition on an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
