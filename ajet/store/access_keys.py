"""`AccessKeys`: who may send what to a store's server. Keys have a name, roles, and an end.

The store keeps only digests: who reads its file learns no key. Rotating makes a new key of the same name, and lets the
old one live a while; what was claimed with the old one belongs to the new one, too.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ajet.store.context import Caller
from ajet.store.requests import KeyRefusedError, Role, StoreError, UnknownIdError
from ajet.store.rows import Row
from ajet.store.sqlite import SqliteConnection
from ajet.store.tables import Tables
from ajet.system.access import PREFIX

MAX_NAME_CHARS = 64
SHORTEST_KEY_CHARS = 32


@dataclass(frozen=True, slots=True)
class AccessKey:
    """What a store knows of a key."""

    name: str
    roles: frozenset[Role]
    created: float
    expires: float | None


class AccessKeys:
    """The keys of one store, as they were when they were last read."""

    def __init__(self) -> None:
        self._by_digest: dict[str, AccessKey] = {}

    def read(self, rows: Iterable[Row]) -> None:
        """Take what `Tables.access_keys` found."""
        self._by_digest = {row[1]: _key(row) for row in rows}

    def __len__(self) -> int:
        return len(self._by_digest)

    def caller(self, key: str) -> Caller:
        """Whose key this is. Raises KeyRefusedError.

        Keys are looked up by their digest: how long that takes tells nothing about a key.
        """
        found = self._by_digest.get(_digest(key))
        if found is None:
            raise KeyRefusedError("not a key of this store, or it was revoked: see `ajet store keys list`")
        if found.expires is not None and found.expires <= time.time():
            raise KeyRefusedError(f"the key {found.name!r} has expired: make one with `ajet store keys rotate`")
        return Caller(found.name, found.roles)


def issue(tables: Tables, name: str, roles: Iterable[Role], valid_seconds: float | None = None) -> str:
    """A new key. It is not shown again."""
    if not name.isprintable() or " " in name or not 0 < len(name) <= MAX_NAME_CHARS or not name.isascii():
        raise StoreError(f"a key's name has 1 to {MAX_NAME_CHARS} printable ASCII characters and no space: {name!r}")
    if any(key.name == name and _alive(key) for key in listed(tables)):
        raise StoreError(f"there is a key named {name!r} already: rotate it, or choose another name")
    return _add(tables, name, frozenset(roles), valid_seconds)


def accept(tables: Tables, name: str, roles: Iterable[Role], key: str) -> None:
    """Let a key in that was made elsewhere. It must be long and random."""
    if len(key) < SHORTEST_KEY_CHARS:
        raise StoreError(f"a key has at least {SHORTEST_KEY_CHARS} characters, long and random")
    tables.add_access_key(name, _digest(key), ",".join(sorted(frozenset(roles))), time.time(), None)


def rotate(tables: Tables, name: str, valid_seconds: float | None = None, grace_seconds: float = 3600.0) -> str:
    """A new key with the name and roles of an old one, which is valid for `grace_seconds` more."""
    roles = {role for key in listed(tables) if key.name == name for role in key.roles}
    if not roles:
        raise UnknownIdError(f"no key named {name!r}: see `ajet store keys list`")
    tables.expire_access_keys(name, time.time() + grace_seconds)
    return _add(tables, name, frozenset(roles), valid_seconds)


def revoke(tables: Tables, name: str) -> None:
    """End every key of this name."""
    if not any(key.name == name for key in listed(tables)):
        raise UnknownIdError(f"no key named {name!r}: see `ajet store keys list`")
    tables.expire_access_keys(name, time.time())


def listed(tables: Tables) -> list[AccessKey]:
    """All keys, those that have expired included."""
    return [_key(row) for row in tables.access_keys()]


def _add(tables: Tables, name: str, roles: frozenset[Role], valid_seconds: float | None) -> str:
    key = f"{PREFIX}{secrets.token_urlsafe(32)}"
    now = time.time()
    expires = None if valid_seconds is None else now + valid_seconds
    tables.add_access_key(name, _digest(key), ",".join(sorted(roles)), now, expires)
    return key


def _key(row: Row) -> AccessKey:
    return AccessKey(row[0], frozenset(Role(role) for role in row[2].split(",")), row[3], row[4])


def _alive(key: AccessKey) -> bool:
    return key.expires is None or key.expires > time.time()


def _digest(key: str) -> str:
    """Keys are long random numbers: a plain hash can't be undone by guessing."""
    return hashlib.sha256(key.encode()).hexdigest()


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
