"""`PostgresDatabase`: a store in PostgreSQL. Several servers may share one; `NOTIFY` tells each what the others did.

Transactions run in threads, each with a connection of its own. A claim takes rows that no other claim is taking
(`FOR UPDATE SKIP LOCKED`).
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command
from ajet.store.requests import StoreError, StoreUnavailableError
from ajet.store.rows import Row, migrate
from ajet.store.tables import Events, Tables

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

TYPES = {
    "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "integer": "BIGINT",
    "real": "DOUBLE PRECISION",
    "blob": "BYTEA",
    "clustered": "",
}
CONNECTIONS = 8
"""Transactions at a time."""
CHANNEL = "ajet_store"
IDS_IN_NOTICE = 200
"""PostgreSQL takes less than 8,000 bytes in one notice, and an id has 23."""
MIGRATION_LOCK = 0x616A6574
"""Key of the advisory lock under which tables are made: two servers may start at the same moment."""
RECONNECT_S = 1.0


class PostgresConnection:
    skip_locked = " FOR UPDATE SKIP LOCKED"
    for_update = " FOR UPDATE"

    def __init__(self, url: str) -> None:
        import psycopg

        self.raw: psycopg.Connection[Any] = psycopg.connect(url)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        cursor = self.raw.execute(_own_marks(sql), values)
        return cursor.fetchall() if cursor.description is not None else []

    def many(self, sql: str, values: Sequence[Sequence[Any]]) -> int:
        if not values:
            return 0
        with self.raw.cursor() as cursor:
            cursor.executemany(_own_marks(sql), values)
            return max(0, cursor.rowcount)


class PostgresDatabase:
    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: queue.SimpleQueue[PostgresConnection] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ajet-store")
        self._opened: list[PostgresConnection] = []
        self._lock = threading.Lock()
        self._listener: asyncio.Task[None] | None = None
        self._happened: Callable[[Events], None]
        self._missed: Callable[[], None]

    async def open(self, happened: Callable[[Events], None], missed: Callable[[], None]) -> None:
        self._happened, self._missed = happened, missed
        try:
            import psycopg
        except ImportError:
            raise MissingDependencyError(f"--postgres needs psycopg: {install_command('postgres')}") from None
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._set_up)
            listening = await self._listen()
        except psycopg.Error as error:
            raise StoreError(f"--postgres: can't use {_without_password(self._url)}: {str(error).strip()}") from error
        self._listener = asyncio.create_task(self._pass_on(listening))

    async def transact(self, work: Callable[[Tables], T], *, durable: bool = True) -> T:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, durable)
        except RuntimeError:  # its threads end
            raise StoreUnavailableError("the store is closed") from None
        return await answer

    async def aclose(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        for connection in self._opened:
            connection.raw.close()
        self._opened.clear()

    # ------------------------------------------------------------ in threads

    def _set_up(self) -> None:
        connection = self._connection()
        with connection.raw.transaction():
            run = connection.rows
            run(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            run("CREATE TABLE IF NOT EXISTS store_version (version BIGINT NOT NULL)")
            found = run("SELECT version FROM store_version")
            version = migrate(
                found[0][0] if found else 0,
                lambda sql: run(sql.format(**TYPES)),
                _without_password(self._url),
            )
            if found:
                run("UPDATE store_version SET version = ?", (version,))
            else:
                run("INSERT INTO store_version VALUES (?)", (version,))
        self._idle.put(connection)

    def _run(self, work: Callable[[Tables], T], durable: bool) -> T:
        import psycopg

        try:
            connection = self._connection()
        except psycopg.Error as error:
            raise StoreUnavailableError(f"{_without_password(self._url)}: {str(error).strip()}") from error
        try:
            with connection.raw.transaction():
                if not durable:
                    connection.rows("SET LOCAL synchronous_commit = off")
                tables = Tables(connection)
                result = work(tables)
                for notice in _notices(tables.events):
                    connection.rows("SELECT pg_notify(?, ?)", (CHANNEL, notice))
        except psycopg.Error as error:
            raise StoreUnavailableError(f"{_without_password(self._url)}: {error}. Nothing was stored") from error
        finally:
            if connection.raw.closed or connection.raw.broken:
                with self._lock:
                    self._opened.remove(connection)
            else:
                self._idle.put(connection)
        return result

    def _connection(self) -> PostgresConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            connection = PostgresConnection(self._url)
            with self._lock:
                self._opened.append(connection)
            return connection

    # ------------------------------------------------------------ what happened, here and in other servers

    async def _listen(self) -> psycopg.AsyncConnection[Any]:
        import psycopg

        connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        await connection.execute(f"LISTEN {CHANNEL}")
        return connection

    async def _pass_on(self, listening: psycopg.AsyncConnection[Any] | None) -> None:
        """Report the events of all servers, until cancelled. Reconnects if the connection is lost."""
        import psycopg

        while True:
            try:
                if listening is None:
                    await asyncio.sleep(RECONNECT_S)
                    listening = await self._listen()
                    self._missed()
                async for notice in listening.notifies():
                    queued, ended = json.loads(notice.payload)
                    self._happened(Events(queued, set(ended)))
            except psycopg.Error:
                listening = None
            except asyncio.CancelledError:
                if listening is not None:
                    await listening.close()
                raise


def _notices(events: Events) -> list[str]:
    """The events, in as few notices as fit PostgreSQL's limit."""
    ended = sorted(events.ended)
    batches = [ended[start : start + IDS_IN_NOTICE] for start in range(0, len(ended), IDS_IN_NOTICE)]
    if events.queued or batches:
        first, *others = batches or [[]]
        return [json.dumps([events.queued, first]), *(json.dumps([0, batch]) for batch in others)]
    return []


def _own_marks(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


def _without_password(url: str) -> str:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        return "that address"
    parts.pop("password", None)
    return make_conninfo("", **parts)
