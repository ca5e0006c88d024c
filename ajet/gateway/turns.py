"""`Turns`: large requests are read one at a time, each key's in its turn, and after each the service loop is free for a
while.

Reading one takes milliseconds in which nobody else is served. Without turns, one client that sends many of them at once
would hold up all others for the sum; now an honest call waits for at most one of them, and a key with many waits behind
the other keys' next ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

LARGE = 8192
"""Bytes of a request that are read in a fraction of a millisecond: less needs no turn."""
REST = 7.0
"""How long the loop is free after a turn, in times of what the turn took: large requests get an eighth of its time."""


class Turns:
    """Lives on the service loop."""

    def __init__(self, rest: float = REST) -> None:
        self._rest = rest
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By key, in the order in which they are next."""
        self._taken = False

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for a turn of `key`; it lasts as long as the block, which must not await anything unless there is no
        rest after it."""
        if self._taken:
            await self._wait(key)
        self._taken = True
        began = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - began
            asyncio.get_running_loop().call_later(self._rest * took, self._next)

    async def _wait(self, key: Hashable) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # its turn had just come
                self._next()
            raise

    def _next(self) -> None:
        """Give the turn to the key that has waited longest, if there is one."""
        self._taken = False
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            first = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the others
            if not first.done():
                self._taken = True
                first.set_result(None)
                return
