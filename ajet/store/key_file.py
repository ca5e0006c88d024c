"""`key_tables`: the keys of a store, also while a server has it open.

A SQLite store is opened a second time here, beside the server's own connection; nothing but keys is touched.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ajet.store.errors import StoreError
from ajet.store.sqlite import SqliteConnection
from ajet.store.tables import Tables

T = TypeVar("T")


async def key_tables(path: str | None, postgres: str | None, work: Callable[[Tables], T]) -> T:
    """Run `work` in a transaction on the keys. Raises a StoreError."""
    if path is not None:
        return _in_file(Path(path), work)
    from ajet.store.postgres import PostgresDatabase

    assert postgres is not None
    database = PostgresDatabase(postgres)
    await database.open(lambda events: None, lambda: None)
    try:
        return await database.transact(work)
    finally:
        await database.aclose()


def _in_file(path: Path, work: Callable[[Tables], T]) -> T:
    if not path.is_file():
        raise StoreError(f"{path}: no such file. `ajet store --path {path}` makes it, and its first keys")
    connection = SqliteConnection(path)
    try:
        connection.set_up(str(path))
        connection.raw.execute("BEGIN IMMEDIATE")
        result = work(Tables(connection))
        connection.raw.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"{path}: not a store, or it can't be written: {error}") from error
    finally:
        connection.raw.close()
    return result
