"""`open_store`: the kinds of store that there are. A kind is a `Database`."""

from __future__ import annotations

from pathlib import Path

from ajet.store.database_store import Database, DatabaseStore, Retention
from ajet.store.sqlite import SqliteDatabase


def sqlite_store(path: str | Path, retention: Retention | None = None) -> DatabaseStore:
    """In one file. What was acknowledged is on disk."""
    return DatabaseStore(SqliteDatabase(path), retention)


def memory_store(retention: Retention | None = None) -> DatabaseStore:
    """In this process's memory, gone with it."""
    return DatabaseStore(SqliteDatabase(None), retention)


def postgres_store(url: str, retention: Retention | None = None) -> DatabaseStore:
    """In PostgreSQL (`postgresql://user@host/database`), shared with other servers."""
    return DatabaseStore(_postgres(url), retention)


def _postgres(url: str) -> Database:
    from ajet.store.postgres import PostgresDatabase  # psycopg is an optional package

    return PostgresDatabase(url)
