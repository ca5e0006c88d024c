"""`DatabaseStore`: the store itself, over a `Database`: SQLite in a file or in memory, or PostgreSQL.

Requests are checked and copied as if they had come over the wire. Waiting is done here, outside of transactions:
`Waiting` holds the callers that wait for rollouts to end, or for the queue to fill. A background task, and never a
side effect of calls, ends overdue attempts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ajet.store import requests as ask
from ajet.store.context import AnsweredMeanwhile, Context, StoreCaller
from ajet.store.operations import DELETE_AT_ONCE, EXPIRE_AT_ONCE, carry_out, delete_old, expire_overdue
from ajet.store.records import AttemptedRollout
from ajet.store.requests import READING, REGAINED, StoreError, StoreRequest, StoreUnavailableError, checked_copy
from ajet.store.rollout_store import RolloutStore
from ajet.store.sqlite import SqliteDatabase
from ajet.store.tables import Events, Tables

T = TypeVar("T")
log = logging.getLogger(__name__)

WATCH_S = 1.0
"""The watchdog's longest sleep: a deadline that is set meanwhile is noticed within it."""
SWEEP_S = 60.0
"""How often old records are deleted."""
REQUEST_MEMORY_S = 3600.0
"""How long a repeated request is recognised: longer than any client keeps trying."""


class _Wait:
    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = set(missing)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Waiting:
    """Callers that wait: for rollouts to end, or in line for the queue."""

    def __init__(self) -> None:
        self._by_rollout: dict[str, set[_Wait]] = {}
        self._claimers: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._arrival: asyncio.Event | None = None

    def ends_of(self, rollout_ids: Iterable[str]) -> _Wait:
        """Begin to wait for these rollouts. Query their state only afterwards, so that no end is missed."""
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
        """Get in line for the queue. The future is done when it is this claimer's turn."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._claimers[place] = None
        self.look_again()
        return place

    def look_again(self) -> None:
        """Wake the callers of `arrival`."""
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

    @property
    def in_line(self) -> int:
        return len(self._claimers)

    async def arrival(self) -> None:
        """Wait until another claimer gets in line, or `look_again` is called."""
        if self._arrival is None:
            self._arrival = asyncio.Event()
        await self._arrival.wait()

    def leave(self, place: asyncio.Future[None]) -> None:
        if place in self._claimers:
            del self._claimers[place]
            place.cancel()

    def wake_next(self, count: int = 1) -> None:
        """Wake as many claimers: rollouts were queued, or a claimer left some in the queue."""
        while count > 0 and self._claimers:
            place, _ = self._claimers.popitem(last=False)
            if not place.done():
                place.set_result(None)
                count -= 1

    def happened(self, events: Events) -> None:
        self.wake_next(events.queued)
        for rollout_id in events.ended:
            for wait in self._by_rollout.pop(rollout_id, ()):
                wait.missing.discard(rollout_id)
                if not wait.missing:
                    self._wake(wait)

    def wake_all(self) -> None:
        """Wake all: events may have been missed."""
        self.wake_next(len(self._claimers))
        for wait in {wait for waiting in self._by_rollout.values() for wait in waiting}:
            self._wake(wait)

    def _wake(self, wait: _Wait) -> None:
        if not wait.done.done():
            wait.done.set_result(None)


class Database(Protocol):
    """Keeps a store's tables: runs transactions, and reports what they did. Used on one event loop.

    To add a kind, implement these methods, and let `ajet/store/database_store.py` make it.
    """

    async def open(self, happened: Callable[[Events], None], missed: Callable[[], None]) -> None:
        """Connect, and bring the tables to the newest version. Raises a StoreError.

        `happened` is called on the event loop after each transaction that queued or ended something, also if another
        process made it; `missed` if some may have gone unnoticed.
        """
        ...

    async def transact(self, work: Callable[[Tables], T], *, durable: bool = True) -> T:
        """Run `work` in a transaction, and return once it is committed. What it raises undoes it.

        `durable=False`: it may be lost if the machine stops, but not if only this process is killed.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept. Only rollouts that have ended are deleted, the oldest first."""

    keep_seconds: float | None = None
    """After their end."""
    keep_bytes: int | None = None
    """The limit for inputs, results and spans together."""


class DatabaseStore(RolloutStore):
    """Open it with `async with`, or `await open()` and `await aclose()`."""

    def __init__(
        self, database: Database, retention: Retention | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._retention = retention or Retention()
        self._clock = clock
        self._opened_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.waiting = Waiting()

    async def open(self) -> DatabaseStore:
        """Connect. Raises a StoreError."""
        await self._database.open(self.waiting.happened, self.waiting.wake_all)
        self._opened_at = self._clock()
        self._begin_watch()
        return self

    def keep_watch(self) -> None:
        """Go on ending overdue attempts and deleting old rollouts if the event loop that did so is closed, as between
        one `asyncio.run` and the next."""
        if any(task.get_loop().is_closed() for task in self._tasks):
            self._begin_watch()

    def _begin_watch(self) -> None:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._sweep())]

    async def __aenter__(self) -> DatabaseStore:
        return await self.open()

    async def aclose(self) -> None:
        tasks, self._tasks = [task for task in self._tasks if not task.done()], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.aclose()

    # ------------------------------------------------------------ requests

    async def _do(self, request: StoreRequest[T]) -> T:
        return await self.carry_out(checked_copy(request))

    async def carry_out(self, request: StoreRequest[T], caller: StoreCaller | None = None) -> T:
        """Answer a request that was checked already, on behalf of a caller. Raises a StoreError."""
        answer: Any
        if isinstance(request, ask.Claim):
            answer = await self._claim(request, caller)
        elif isinstance(request, ask.Wait):
            answer = await self._wait(request, caller)
        else:
            answer = await self._transact(request, caller)
        result: T = answer
        return result

    async def _transact(self, request: StoreRequest[Any], caller: StoreCaller | None) -> Any:
        durable = type(request) not in READING | REGAINED

        def work(tables: Tables) -> Any:
            return carry_out(request, Context(tables, self._clock(), self._opened_at, caller))

        try:
            return await self._database.transact(work, durable=durable)
        except AnsweredMeanwhile:
            return await self._database.transact(work, durable=durable)

    async def _claim(self, request: ask.Claim, caller: StoreCaller | None) -> list[AttemptedRollout]:
        """Take rollouts from the queue; callers that wait get theirs in the order of their coming."""
        until = time.monotonic() + request.wait_seconds
        while True:
            place, turn_used = self.waiting.place_in_line(), False
            try:
                claimed: list[AttemptedRollout] = await self._transact(request, caller)
                if claimed or request.wait_seconds == 0:
                    return claimed
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await place
                turn_used = True
            except TimeoutError:
                return []
            finally:  # a turn that came with the timeout, a cancellation, an error or the claim itself is another's
                if place.done() and not place.cancelled() and not turn_used:
                    self.waiting.wake_next()
                self.waiting.leave(place)

    async def _wait(self, request: ask.Wait, caller: StoreCaller | None) -> list[AttemptedRollout]:
        wait = self.waiting.ends_of(request.rollout_ids)
        try:
            ended: list[AttemptedRollout] = await self._transact(request, caller)
            if len(ended) == len(set(request.rollout_ids)) or request.wait_seconds == 0:
                return ended
            for one in ended:  # these need not be waited for
                wait.missing.discard(one.rollout.rollout_id)
            if wait.missing:
                try:
                    async with asyncio.timeout(request.wait_seconds):
                        await wait.done
                except TimeoutError:
                    pass
            ended = await self._transact(request, caller)
            return ended
        finally:
            self.waiting.forget(wait)

    # ------------------------------------------------------------ by the clock

    async def expire_overdue(self) -> float | None:
        """End attempts past their deadline. Returns when the next deadline is."""
        looked_at, following = EXPIRE_AT_ONCE, None
        while looked_at == EXPIRE_AT_ONCE:
            looked_at, following = await self._database.transact(
                lambda tables: expire_overdue(Context(tables, self._clock(), self._opened_at))
            )
        return following

    async def delete_old(self) -> int:
        """Delete the rollouts that the retention no longer keeps. Returns how many."""
        keep, total, deleted = self._retention, 0, DELETE_AT_ONCE
        now = self._clock()
        await self._database.transact(lambda tables: tables.forget_requests(now - REQUEST_MEMORY_S))
        while deleted >= DELETE_AT_ONCE and keep != Retention():
            deleted = await self._database.transact(
                lambda tables: delete_old(Context(tables, now, self._opened_at), keep.keep_seconds, keep.keep_bytes)
            )
            total += deleted
        return total

    async def _watch(self) -> None:
        while True:
            following: float | None = None
            try:
                following = await self.expire_overdue()
            except StoreError as error:
                log.warning("the store's watchdog: %s", error)
            left = WATCH_S if following is None else min(max(following - self._clock(), 0.01), WATCH_S)
            await asyncio.sleep(left)

    async def _sweep(self) -> None:
        while True:
            try:
                if deleted := await self.delete_old():
                    log.info("deleted %d old rollouts", deleted)
            except StoreUnavailableError as error:
                log.warning("deleting old rollouts: %s", error)
            await asyncio.sleep(SWEEP_S)

    # ------------------------------------------------------------ keys

    async def tables(self, work: Callable[[Tables], T]) -> T:
        """Run `work` on the tables, for what isn't a request: managing keys."""
        return await self._database.transact(work)


def sqlite_store(path: str | Path, retention: Retention | None = None) -> DatabaseStore:
    """Make a store in one file. What was acknowledged is on disk."""
    return DatabaseStore(SqliteDatabase(path), retention)


def memory_store(retention: Retention | None = None) -> DatabaseStore:
    """Make a store in this process's memory. It ends with the process."""
    return DatabaseStore(SqliteDatabase(None), retention)


def postgres_store(url: str, retention: Retention | None = None) -> DatabaseStore:
    """Make a store in PostgreSQL (`postgresql://user@host/database`), which other servers may share."""
    from ajet.store.postgres import PostgresDatabase  # psycopg is an optional package

    return DatabaseStore(PostgresDatabase(url), retention)
