"""The tables of `episodes.sqlite`: opens the file, adds and removes rows.

The recorder writes through this, inside its own transactions; `EpisodeStore` reads.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from ajet.observe import task_rows
from ajet.observe.episode_codec import Annotation, decode_episode, one_line, preview, searchable_text
from ajet.schema.episode import Episode
from ajet.schema.errors import UserError
from ajet.schema.printable import encodable
from ajet.schema.task import Task

VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episode (
  id INTEGER PRIMARY KEY,            -- order of recording
  episode_id TEXT NOT NULL UNIQUE,
  step INTEGER NOT NULL,
  validation INTEGER NOT NULL,
  task_id TEXT NOT NULL,
  group_id TEXT NOT NULL,
  repeat INTEGER NOT NULL,
  tag TEXT NOT NULL,
  status TEXT NOT NULL,
  outcomes TEXT NOT NULL,            -- separated by spaces
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
CREATE INDEX IF NOT EXISTS episode_kind ON episode (status, tag, failure, validation);
CREATE TABLE IF NOT EXISTS agent (
  name TEXT NOT NULL, episode INTEGER NOT NULL, PRIMARY KEY (name, episode)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS body (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS annotation (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS task (task_id TEXT PRIMARY KEY, query TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS task_record (task_id TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS token (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, content='', tokenize='unicode61');
"""
"""What lists show is kept apart from the bodies, so scanning 100,000 rows reads no body. Files of older versions lack
`task_record` until they are written to again."""
_NO_QUERY = "[not defined]"
"""What tasks of an environment service have for a question: the first observation says what to do."""
_LONGEST_VALUE = 20_000
"""Characters of one text in a task's record; of a longer one, its beginning is kept."""
_COLUMNS = (
    "episode_id", "step", "validation", "task_id", "group_id", "repeat", "tag", "status", "outcomes", "failure",
    "reward", "success", "agents", "calls", "turns", "tokens", "sampled", "trained", "forks", "attempts", "seconds",
    "recorded", "preview",
)  # fmt: skip
_INSERT = f"INSERT INTO episode ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


class EpisodeStoreError(UserError):
    """An `episodes.sqlite` that can't be read."""


def open_for_writing(path: Path, success_threshold: float = 1.0) -> sqlite3.Connection:
    """The writer's connection. Transactions are explicit: `commit` ends them."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        _prepare(connection, path, success_threshold)
    except sqlite3.OperationalError as error:  # locked, read-only, a full disk
        connection.close()
        raise EpisodeStoreError(f"{path} can't be written to: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        fix = (
            f"to go on without its episodes, move it away ({path.name}-wal and {path.name}-shm, too, if they are there)"
        )
        raise EpisodeStoreError(f"{path}: {error}; {fix}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, success_threshold: float) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # NORMAL: a killed process loses nothing it committed; only a crash of the machine may lose the last moments
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("PRAGMA user_version").fetchone()[0] in (0, VERSION):
        connection.executescript(f"BEGIN; {_SCHEMA} {task_rows.SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    _check_version(connection, path)
    task_rows.prepare(connection, success_threshold)


def commit(connection: sqlite3.Connection) -> None:
    """End a transaction that added or removed episodes."""
    task_rows.refresh(connection)
    connection.execute("COMMIT")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection, which sees each batch as soon as it is committed."""
    if not path.exists():
        raise EpisodeStoreError(f"{path}: no such file. Episodes are recorded while a run is going on.")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError:  # on read-only media
        connection.close()
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise EpisodeStoreError(f"{path}: {error}") from error
    connection.row_factory = sqlite3.Row
    _check_version(connection, path)
    return connection


def used_bytes(connection: sqlite3.Connection) -> int:
    """Size of the file's contents. Space of deleted episodes is reused."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def insert_episode(
    connection: sqlite3.Connection,
    episode: Episode,
    body: bytes,
    step: int,
    validation: bool,
    query: str,
    recorded: float,
) -> int:
    """Add an episode, replacing one with the same id. Returns its row."""
    tree, query = episode.tree, "" if query == _NO_QUERY else query
    found = connection.execute("SELECT id FROM episode WHERE episode_id = ?", (episode.episode_id,)).fetchone()
    if found:
        _delete(connection, [found[0]])
    agents = list(dict.fromkeys(call.agent for call in tree.calls))
    values = (
        episode.episode_id,
        step,
        int(validation),
        episode.task_id,
        episode.group_id,
        episode.repeat,
        episode.tag,
        str(episode.status),
        " ".join(map(str, episode.outcomes)),
        episode.failure.kind if episode.failure else "",
        episode.reward,
        None if episode.is_success is None else int(episode.is_success),
        json.dumps(agents),
        len(tree.calls),
        max((call.turn + 1 for call in tree.calls), default=0),
        tree.tokens,
        tree.sampled_tokens,
        tree.trained_tokens,
        sum(call.fork is not None for call in tree.calls),
        episode.attempts,
        float(episode.timings.get("total", 0.0)),
        recorded,
        one_line(query) or preview(episode),
    )
    row = connection.execute(_INSERT, [_storable(value) for value in values]).lastrowid
    assert row is not None
    connection.execute("INSERT INTO body (id, data) VALUES (?, ?)", (row, body))
    connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, searchable_text(episode)))
    named = [(encodable(agent), row) for agent in agents]
    connection.executemany("INSERT INTO agent (name, episode) VALUES (?, ?)", named)
    if query:
        question = (encodable(episode.task_id), encodable(query))
        connection.execute("INSERT OR IGNORE INTO task (task_id, query) VALUES (?, ?)", question)
    return row


def _storable(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


def insert_task(connection: sqlite3.Connection, task: Task) -> None:
    """Add what the reader gave of a task, once. Secrets in it must already be masked."""
    task_id = encodable(task.task_id)
    if not connection.execute("SELECT 1 FROM task_record WHERE task_id = ?", (task_id,)).fetchone():
        text = json.dumps(_shortened(task.model_dump()), default=str)
        connection.execute("INSERT INTO task_record VALUES (?, ?)", (task_id, zlib.compress(text.encode())))


def read_task(data: bytes) -> Task:
    """The inverse of what `insert_task` wrote."""
    return Task.model_validate_json(zlib.decompress(data))


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"{value[:_LONGEST_VALUE]}… ({len(value) - _LONGEST_VALUE:,} more characters were not recorded)"
    return value


def insert_annotation(connection: sqlite3.Connection, row: int, annotation: Annotation, data: bytes) -> None:
    """Add credit and trainer logprobs to the episode in this row."""
    connection.execute("INSERT INTO annotation (id, data) VALUES (?, ?)", (row, data))
    trained = [call.advantage for call in annotation.credit or [] if call.entries]
    if trained:
        connection.execute("UPDATE episode SET advantage = ? WHERE id = ?", (sum(trained) / len(trained), row))


def delete_oldest(connection: sqlite3.Connection, count: int) -> int:
    """Remove the oldest episodes. Returns how many were removed."""
    rows = [row[0] for row in connection.execute("SELECT id FROM episode ORDER BY id LIMIT ?", (count,))]
    _delete(connection, rows)
    return len(rows)


def delete_after(connection: sqlite3.Connection, step: int) -> None:
    """Remove the episodes of later steps."""
    _delete(connection, [row[0] for row in connection.execute("SELECT id FROM episode WHERE step > ?", (step,))])


def _delete(connection: sqlite3.Connection, rows: list[int]) -> None:
    for row in rows:
        (body,) = connection.execute("SELECT data FROM body WHERE id = ?", (row,)).fetchone()
        # the index keeps no content of its own, so it needs the text to remove
        text = searchable_text(decode_episode(body))
        connection.execute("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (row, text))
        connection.execute("DELETE FROM agent WHERE episode = ?", (row,))
        for table in ("body", "annotation", "episode"):
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (row,))


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise EpisodeStoreError(f"{path}: {error}") from error
    if found != VERSION:
        raise EpisodeStoreError(
            f"{path}: written in format {found}, but this ajet reads format {VERSION}. Use the version that wrote it."
        )
