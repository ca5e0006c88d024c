"""`Connections`: all the connections of one server, and how many there may be.

A connection is a stranger's until a request on it is admitted with a valid key. When all places are taken, a newcomer
gets the place of the stranger who came first, and some places are never anybody else's: so whoever opens connections
without a key only pushes out others like it, and an honest newcomer, who asks at once, always finds room.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter, deque
from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

from ajet.system.http.refusals import Refusals

if TYPE_CHECKING:
    from ajet.system.http_protocol import HttpConnection, HttpHandler, HttpLimits

RECEIVED_BYTES = 65_536
"""So much of one connection is read before it is another's turn."""
MOST_CONNECTIONS = 16_384
FEWEST_CONNECTIONS = 16
STRANGERS = 4
"""One of so many places is kept for strangers."""
PAYERS = 4
"""So many keys can upload what they like at the same time."""
GRACE_S = 0.25
"""How long a stranger has to ask before its place may go to another."""


class Connections:
    """What all the connections of a server share."""

    def __init__(self, handler: HttpHandler, limits: HttpLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.received = memoryview(bytearray(RECEIVED_BYTES))
        """What a connection has just received: one after the other they read it at once. A buffer of its own for each
        piece would cost several times what is done with it."""
        self.refusals = Refusals()
        self.discarding = 0
        """Connections whose last answer is a refusal, and from which the rest is read to be thrown away."""
        self._to_read: deque[HttpConnection] = deque()
        """More will have arrived from them; the first is read next."""
        self._buffered = 0
        """Bytes of bodies that are being received, or wait behind other requests."""
        self._buffered_by: Counter[Hashable] = Counter()
        self._most = limits.max_connections or most_connections()
        self._arriving: dict[asyncio.Task[None], float] = {}
        """Accepted, but not yet connections (a TLS handshake can take long), and when. Longest waiting first."""
        self._strangers: dict[HttpConnection, float] = {}
        """Since when they are open. Longest open first."""
        self._known: dict[HttpConnection, None] = {}
        """Longest without a request first."""

    def __len__(self) -> int:
        return len(self._arriving) + len(self._strangers) + len(self._known)

    # ------------------------------------------------------------ turns

    def read_later(self, connection: HttpConnection) -> None:
        """Read on from a connection that filled the buffer, in its turn: one piece of a large body is read each time
        the loop goes round, however many arrive at once, so that small requests wait for no more than that."""
        self._to_read.append(connection)
        if len(self._to_read) == 1:
            self.loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        self._to_read.popleft().read_on()
        if self._to_read:
            self.loop.call_soon(self._read_next)

    # ------------------------------------------------------------ memory

    def take(self, payer: Hashable, size: int) -> bool:
        """Hold so much more for a payer. False if that is more than its share, or all there is."""
        self._buffered += size
        self._buffered_by[payer] += size
        most = self.limits.max_buffered_bytes
        share = most if payer is None else max(self.limits.max_body_bytes, most // PAYERS)
        return self._buffered <= most and self._buffered_by[payer] <= share

    def give_back(self, payer: Hashable, size: int) -> None:
        self._buffered -= size
        self._buffered_by[payer] -= size
        if not self._buffered_by[payer]:
            del self._buffered_by[payer]

    # ------------------------------------------------------------ coming and going

    async def room(self) -> None:
        """Wait until there is a place for a newcomer, at the cost of another stranger if need be."""
        while len(self) >= self._most:
            since = next(iter(self._strangers.values()), inf)
            arrived = next(iter(self._arriving.values()), inf)
            if (young := min(since, arrived) + GRACE_S - self.loop.time()) > 0:
                await asyncio.sleep(min(young, GRACE_S))
            elif since <= arrived:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort()
            else:
                slowest = next(iter(self._arriving))
                del self._arriving[slowest]
                slowest.cancel()

    def arrive(self, arrival: asyncio.Task[None]) -> None:
        """Somebody connects."""
        self._arriving[arrival] = self.loop.time()
        arrival.add_done_callback(lambda task: self._arriving.pop(task, None))

    def add(self, connection: HttpConnection) -> None:
        self._strangers[connection] = self.loop.time()

    def remove(self, connection: HttpConnection) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def know(self, connection: HttpConnection) -> bool:
        """A request on this connection had a valid key. False if there is no room for one more such connection."""
        if self._known.pop(connection, self) is self:
            if connection not in self._strangers:
                return False  # already cut off
            if len(self._known) >= self._most - max(1, self._most // STRANGERS) and not self._end_an_idle_one():
                return False
            del self._strangers[connection]
        self._known[connection] = None
        return True

    def _end_an_idle_one(self) -> bool:
        idle = next((connection for connection in self._known if connection.idle), None)
        if idle is None:
            return False
        del self._known[idle]
        idle.abort()
        return True

    # ------------------------------------------------------------ ends

    def sweep(self) -> None:
        """End the connections that are past their deadline."""
        now = self.loop.time()
        self.refusals.sweep(now)
        for connection in [one for one in (*self._strangers, *self._known) if one.deadline < now]:
            connection.expire()

    def abort(self) -> None:
        """End them all."""
        for arrival in list(self._arriving):
            arrival.cancel()
        for connection in (*self._strangers, *self._known):
            connection.abort()


def most_connections() -> int:
    """Half of the files this process may have open: the rest is for what it does itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft < 0 else max(FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, soft // 2))
