"""`Waiting`: those who wait for rollouts to end, or for the queue to fill. On the event loop only.

Whoever waits for many rollouts is woken once, when the last of them has ended. A rollout that is queued wakes one
claimer, the one that has waited longest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from ajet.store.tables import Events


class _Wait:
    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = set(missing)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Waiting:
    """Who waits for what."""

    def __init__(self) -> None:
        self._by_rollout: dict[str, set[_Wait]] = {}
        self._claimers: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._arrival: asyncio.Event | None = None
        self.turns = 0
        """How often it was a claimer's turn."""
        self.wakes = 0
        """How often somebody who waits for rollouts to end was woken."""

    def ends_of(self, rollout_ids: Iterable[str]) -> _Wait:
        """Begin to wait. Ask for their state only afterwards: then no end can slip through."""
        wait = _Wait(rollout_ids)
        for rollout_id in wait.missing:
            self._by_rollout.setdefault(rollout_id, set()).add(wait)
        return wait

    def forget(self, wait: _Wait) -> None:
        for rollout_id in wait.missing:
            waiting = self._by_rollout.get(rollout_id)
            if waiting is not None:
                waiting.discard(wait)
                if not waiting:
                    del self._by_rollout[rollout_id]
        wait.missing.clear()

    def place_in_line(self) -> asyncio.Future[None]:
        """Begin to wait for the queue; the future is done when it is this claimer's turn."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._claimers[place] = None
        self.look_again()
        return place

    def look_again(self) -> None:
        """Wake those in `arrival`."""
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

    @property
    def in_line(self) -> int:
        """How many claimers wait."""
        return len(self._claimers)

    async def arrival(self) -> None:
        """Wait until another claimer gets in line, or somebody says `look_again`."""
        if self._arrival is None:
            self._arrival = asyncio.Event()
        await self._arrival.wait()

    def leave(self, place: asyncio.Future[None]) -> None:
        """Stop waiting. A turn that was not used goes to the next in line."""
        if place in self._claimers:
            del self._claimers[place]
            place.cancel()

    def wake_next(self, count: int = 1) -> None:
        """Rollouts were queued, or somebody leaves some in the queue."""
        while count > 0 and self._claimers:
            place, _ = self._claimers.popitem(last=False)
            if not place.done():
                place.set_result(None)
                self.turns += 1
                count -= 1

    def happened(self, events: Events) -> None:
        """Wake whom it concerns."""
        self.wake_next(events.queued)
        for rollout_id in events.ended:
            for wait in self._by_rollout.pop(rollout_id, ()):
                wait.missing.discard(rollout_id)
                if not wait.missing:
                    self._wake(wait)

    def wake_all(self) -> None:
        """Something may have been missed: everybody looks again."""
        self.wake_next(len(self._claimers))
        for wait in {wait for waiting in self._by_rollout.values() for wait in waiting}:
            self._wake(wait)

    def _wake(self, wait: _Wait) -> None:
        if not wait.done.done():
            wait.done.set_result(None)
            self.wakes += 1
