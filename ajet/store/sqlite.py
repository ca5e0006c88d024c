"""`SqliteDatabase`: a store in one file, or in memory. One thread writes; waiting transactions share a commit. An
acknowledged write is on disk: the write-ahead log is synchronised before the answer, once for all transactions that
wait. Only one process at a time can open a file. Without a path, the store is in this process's memory and ends with
it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ajet.store.requests import StoreError, StoreUnavailableError
from ajet.store.rows import Row, migrate
from ajet.store.tables import Events, Tables

T = TypeVar("T")

TYPES = {
    "serial": "INTEGER PRIMARY KEY",
    "integer": "INTEGER",
    "real": "REAL",
    "blob": "BLOB",
    "clustered": "WITHOUT ROWID",
}
CHECKPOINT_PAGES = 8000
"""Pages in the write-ahead log before they are copied into the file. Busy pages are then copied once for many commits;
the log stays below some 40 MB."""
MAX_GROUP = 256
"""The most transactions that share a commit. With more, the first would wait too long."""


class _Job(NamedTuple):
    work: Callable[[Tables], Any]
    durable: bool
    done: asyncio.Future[Any]


class _Outcome(NamedTuple):
    job: _Job
    value: Any
    error: BaseException | None


class SqliteConnection:
    skip_locked = ""
    for_update = ""

    def __init__(self, path: str | Path) -> None:
        self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        self._synchronous = ""

    def synchronise(self, how: Literal["FULL", "NORMAL"]) -> None:
        """FULL: what is committed from now on is on disk. NORMAL: it survives a kill."""
        if how != self._synchronous:
            self.raw.execute(f"PRAGMA synchronous = {how}")
            self._synchronous = how

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self.raw.execute(sql, values).fetchall()

    def many(self, sql: str, values: Sequence[Sequence[Any]]) -> int:
        return self.raw.executemany(sql, values).rowcount if values else 0

    def set_up(self, where: str) -> None:
        """Migrate the tables to the newest version."""
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self.synchronise("FULL")
        self.raw.execute("BEGIN IMMEDIATE")
        try:
            if self.raw.execute("SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
                raise StoreError(
                    f"{where} has a trigger or a view, which no store has and which would run with each request\n"
                    "    it was made or changed by another program: use a file of which you know where it comes from"
                )
            found = self.raw.execute("PRAGMA user_version").fetchone()[0]
            version = migrate(found, lambda sql: self.raw.execute(sql.format(**TYPES)), where)
            self.raw.execute(f"PRAGMA user_version = {version}")
        except BaseException:
            self.raw.execute("ROLLBACK")
            raise
        self.raw.execute("COMMIT")


class SqliteDatabase:
    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._name = "the store in memory" if path is None else str(path)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: SqliteConnection | None = None
        self._lock: int | None = None
        self._happened: Callable[[Events], None]

    async def open(self, happened: Callable[[Events], None], missed: Callable[[], None]) -> None:
        self._happened = happened
        if self._path is not None:
            self._lock = _only_one(self._path)
        try:
            self._connection = SqliteConnection(":memory:" if self._path is None else self._path)
            self._connection.set_up(self._name)
        except (sqlite3.Error, StoreError) as error:
            self._close()
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._name}: not a store, or it can't be written: {error}") from error
        self._thread = threading.Thread(target=self._write, name="ajet-store", daemon=True)
        self._thread.start()

    async def transact(self, work: Callable[[Tables], T], *, durable: bool = True) -> T:
        if self._thread is None:
            raise StoreUnavailableError("the store is closed")
        job = _Job(work, durable, asyncio.get_running_loop().create_future())
        self._jobs.put(job)
        result: T = await job.done
        return result

    async def aclose(self) -> None:
        """Wait for pending transactions, then close."""
        thread, self._thread = self._thread, None  # what comes from now on is refused: nothing would run it
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.raw.close()
            self._connection = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------ the thread that writes

    def _write(self) -> None:
        closing = False
        while not closing:
            first = self._jobs.get()
            group = [] if first is None else [first]
            closing = first is None
            with suppress(queue.Empty):
                while not closing and len(group) < MAX_GROUP:
                    job = self._jobs.get_nowait()
                    if job is None:
                        closing = True
                    else:
                        group.append(job)
            if group:
                outcomes, events = self._run(group)
                for loop in {job.done.get_loop() for job in group}:
                    with suppress(RuntimeError):  # the loop was closed meanwhile, so nothing awaits the result
                        loop.call_soon_threadsafe(self._deliver, loop, outcomes, events)

    def _run(self, group: Sequence[_Job]) -> tuple[list[_Outcome], Events]:
        """Run these jobs and commit them together. A job that fails is rolled back without the others."""
        assert self._connection is not None
        raw = self._connection.raw
        outcomes: list[_Outcome] = []
        events = Events()
        try:
            self._connection.synchronise("FULL" if any(job.durable for job in group) else "NORMAL")
            raw.execute("BEGIN IMMEDIATE")
            for job in group:
                tables = Tables(self._connection)
                raw.execute("SAVEPOINT job")
                try:
                    outcomes.append(_Outcome(job, job.work(tables), None))
                except BaseException as error:
                    if isinstance(error, sqlite3.Error):
                        if not raw.in_transaction:  # for example a full disk: everything is rolled back already
                            raise
                        error = StoreUnavailableError(f"{self._name}: {error}. Nothing was stored")
                    raw.execute("ROLLBACK TO job")
                    outcomes.append(_Outcome(job, None, error))
                else:
                    events.queued += tables.events.queued
                    events.ended |= tables.events.ended
                raw.execute("RELEASE job")
            raw.execute("COMMIT")
        except sqlite3.Error as error:
            if raw.in_transaction:
                raw.execute("ROLLBACK")
            refused = StoreUnavailableError(f"{self._name}: can't be written: {error}. Nothing was stored")
            return [_Outcome(job, None, refused) for job in group], Events()
        return outcomes, events

    def _deliver(self, loop: asyncio.AbstractEventLoop, outcomes: Sequence[_Outcome], events: Events) -> None:
        for job, value, error in outcomes:
            if job.done.get_loop() is not loop or job.done.done():  # its caller was cancelled
                continue
            if error is None:
                job.done.set_result(value)
            else:
                job.done.set_exception(error)
        if events:
            self._happened(events)


def _only_one(path: Path) -> int:
    """Lock a store's file against other processes."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: there is no folder {path.parent}")
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: nothing can be written beside it: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            why = "another process is serving this store. Connect to it, or use --postgres for several servers"
        else:
            why = f"its lock can't be taken: {error.strerror}"
        raise StoreError(f"{path}: {why}") from None
    return lock
