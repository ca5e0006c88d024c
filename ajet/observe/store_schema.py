"""The tables of `episodes.sqlite`, and how it is opened for writing and for reading."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ajet.schema.errors import UserError

VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episode (
  id INTEGER PRIMARY KEY,            -- order of arrival
  episode_id TEXT NOT NULL UNIQUE,
  step INTEGER NOT NULL,
  validation INTEGER NOT NULL,
  task_id TEXT NOT NULL,
  group_id TEXT NOT NULL,
  repeat INTEGER NOT NULL,
  tag TEXT NOT NULL,
  status TEXT NOT NULL,
  outcomes TEXT NOT NULL,            -- words, space between
  failure TEXT NOT NULL,             -- kind of failure, '' if none
  reward REAL,
  success INTEGER,
  advantage REAL,                    -- mean over trained calls
  agents TEXT NOT NULL,              -- JSON list of names
  calls INTEGER NOT NULL,
  turns INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  sampled INTEGER NOT NULL,
  trained INTEGER NOT NULL,
  forks INTEGER NOT NULL,
  attempts INTEGER NOT NULL,
  seconds REAL NOT NULL,
  recorded REAL NOT NULL,            -- Unix time
  preview TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS episode_step ON episode (step, reward);
CREATE INDEX IF NOT EXISTS episode_group ON episode (group_id);
CREATE INDEX IF NOT EXISTS episode_task ON episode (task_id);
CREATE INDEX IF NOT EXISTS episode_kind ON episode (status, tag, failure, validation);
CREATE TABLE IF NOT EXISTS agent (
  name TEXT NOT NULL, episode INTEGER NOT NULL, PRIMARY KEY (name, episode)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS body (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS annotation (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS task (task_id TEXT PRIMARY KEY, query TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS token (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, content='', tokenize='unicode61');
"""
"""Rows for lists are apart from bodies, so that a scan of 100,000 rows reads no body."""


class EpisodeStoreError(UserError):
    """An `episodes.sqlite` that can't be read."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The writer's connection. Transactions are explicit."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    connection.execute("PRAGMA journal_mode = WAL")
    # NORMAL: a killed process loses nothing that was committed; only a crash of the machine may lose the last moments
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    _check_version(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A reader's connection: it can't write, and sees each committed batch at once."""
    if not path.exists():
        raise EpisodeStoreError(f"{path}: no such file. Episodes are recorded while a run goes.")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError:  # a folder on read-only media: nobody writes there
        connection.close()
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    _check_version(connection, path)
    return connection


def used_bytes(connection: sqlite3.Connection) -> int:
    """Size of what the file holds; room of deleted episodes is used again."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise EpisodeStoreError(f"{path}: {error}") from error
    if found != VERSION:
        raise EpisodeStoreError(
            f"{path}: written in form {found}, this ajet reads form {VERSION}. Use the version that wrote it."
        )
