"""`Refusals`: who was refused often lately waits for the next refusal.

A client that repeats a bad request as fast as it is answered would otherwise take the server's time from all others.
"""

from __future__ import annotations

from collections.abc import Hashable

FREE = 16
"""So many refusals at once wait for nothing."""
PER_SECOND = 2.0
"""Beyond those, so many are answered."""
LONGEST_PAUSE_S = 5.0


class Refusals:
    """Times are the event loop's."""

    def __init__(self) -> None:
        self._settled: dict[Hashable, float] = {}
        """When a payer's refusals are forgotten: each moves it on by 1 / PER_SECOND."""
        self._told = False

    def __len__(self) -> int:
        return len(self._settled)

    def pause(self, payer: Hashable, now: float) -> float:
        """Note a refusal of this payer. Returns how many seconds its answer waits. Nobody (None) waits for nothing:
        strangers can't be told from each other."""
        if payer is None:
            return 0.0
        free = FREE / PER_SECOND
        settled = min(max(self._settled.get(payer, now), now) + 1 / PER_SECOND, now + free + LONGEST_PAUSE_S)
        self._settled[payer] = settled
        return max(0.0, settled - now - free)

    def untold(self) -> bool:
        """Whether this is asked for the first time."""
        told, self._told = self._told, True
        return not told

    def sweep(self, now: float) -> None:
        """Forget the payers whose refusals are."""
        self._settled = {payer: settled for payer, settled in self._settled.items() if settled > now}
