"""The tables of `episodes.sqlite`: opens the file, adds and removes rows, and keeps those that count attempts by task.

The recorder writes through this, inside its own transactions; `EpisodeStore` reads.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ajet.observe.episode_codec import Annotation, decode_episode, inflated, one_line, preview, searchable_text
from ajet.observe.run_files import make_empty
from ajet.schema.episode import Episode
from ajet.schema.errors import EpisodeFormatError, UserError
from ajet.schema.printable import encodable
from ajet.schema.task import Task

ANY: Final = -1
"""The scope of all attempts; 0 is that of training's, 1 that of validation's."""
SHIFT: Final = 6
"""A block has 2^6 steps: a task of 10,000 steps is summed from 64 of them and from 157 blocks."""

_NOTE = "INSERT OR IGNORE INTO tried_dirty VALUES ({row}.task_id, {row}.step);"

TASK_SCHEMA = f"""
CREATE INDEX IF NOT EXISTS episode_task_step ON episode (task_id, step);
CREATE TABLE IF NOT EXISTS tried_step (
  task_id TEXT NOT NULL, step INTEGER NOT NULL, validation INTEGER NOT NULL,
  attempts INTEGER NOT NULL, usable INTEGER NOT NULL, solved INTEGER NOT NULL, reward REAL NOT NULL,
  tag TEXT NOT NULL, preview TEXT NOT NULL,
  PRIMARY KEY (task_id, step, validation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_block (
  task_id TEXT NOT NULL, block INTEGER NOT NULL, validation INTEGER NOT NULL,
  attempts INTEGER NOT NULL, usable INTEGER NOT NULL, solved INTEGER NOT NULL, reward REAL NOT NULL,
  tag TEXT NOT NULL, preview TEXT NOT NULL,
  PRIMARY KEY (task_id, block, validation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_row (
  scope INTEGER NOT NULL, task_id TEXT NOT NULL, attempts INTEGER NOT NULL, failed INTEGER NOT NULL,
  solved REAL, latest REAL, change REAL, reward REAL, last_step INTEGER NOT NULL, tag TEXT NOT NULL,
  preview TEXT NOT NULL, PRIMARY KEY (scope, task_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_dirty (
  task_id TEXT NOT NULL, step INTEGER NOT NULL, PRIMARY KEY (task_id, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_threshold (value REAL NOT NULL);
CREATE TRIGGER IF NOT EXISTS tried_added AFTER INSERT ON episode BEGIN {_NOTE.format(row="new")} END;
CREATE TRIGGER IF NOT EXISTS tried_removed AFTER DELETE ON episode BEGIN {_NOTE.format(row="old")} END;
"""
SOLVED = "CASE WHEN reward IS NULL THEN 0 WHEN success IS NOT NULL THEN success ELSE reward >= :threshold END"
ATTEMPTS = f"""count(*) AS attempts, count(reward) AS usable, sum({SOLVED}) AS solved,
  sum(coalesce(reward, 0.0)) AS reward, max(tag) AS tag, max(preview) AS preview"""
"""What is counted of some episodes."""
STEPS = """sum(attempts) AS attempts, sum(usable) AS usable, sum(solved) AS solved, sum(reward) AS reward,
  max(tag) AS tag, max(preview) AS preview"""
"""The same of what was counted already."""


_DIRTY_TASKS = "SELECT DISTINCT task_id FROM tried_dirty"
_DIRTY_BLOCKS = f"SELECT DISTINCT task_id, step >> {SHIFT} AS block FROM tried_dirty"
# each begins with the few notes and finds what they name by an index: CROSS JOIN keeps that order
_COUNT = f"""INSERT INTO tried_step SELECT task_id, step, validation, {ATTEMPTS}
  FROM tried_dirty CROSS JOIN episode USING (task_id, step) WHERE status != 'cancelled'
  GROUP BY task_id, step, validation"""
_SUM = f"""INSERT INTO tried_block SELECT dirty.task_id, block, validation, {STEPS}
  FROM ({_DIRTY_BLOCKS}) AS dirty CROSS JOIN tried_step
  ON tried_step.task_id = dirty.task_id AND step >= block << {SHIFT} AND step < (block + 1) << {SHIFT}
  GROUP BY dirty.task_id, block, validation"""
_OF_SCOPE = f"FROM tried_step AS one WHERE one.task_id = whole.task_id AND (scope = {ANY} OR validation = scope)"
_SHARE = f"(SELECT 1.0 * sum(one.solved) / sum(one.usable) {_OF_SCOPE} AND one.step = {{step}})"
_ADD_UP = f"""INSERT INTO tried_row
  WITH whole AS (
    SELECT {ANY} AS scope, task_id, {STEPS} FROM ({_DIRTY_TASKS}) CROSS JOIN tried_block USING (task_id)
    GROUP BY task_id
    UNION ALL SELECT validation, task_id, {STEPS} FROM ({_DIRTY_TASKS}) CROSS JOIN tried_block USING (task_id)
    GROUP BY task_id, validation),
  bounded AS (SELECT *, (SELECT step {_OF_SCOPE} ORDER BY step LIMIT 1) AS first_step,
    (SELECT step {_OF_SCOPE} ORDER BY step DESC LIMIT 1) AS last_step FROM whole)
  SELECT scope, task_id, attempts, attempts - usable, 1.0 * solved / usable, {_SHARE.format(step="last_step")},
    {_SHARE.format(step="last_step")} - {_SHARE.format(step="first_step")}, reward / usable, last_step, tag,
    preview FROM bounded AS whole"""


def refresh_tasks(connection: sqlite3.Connection) -> None:
    """Count again what the notes name, in the transaction of the change: no reader sees one without the other."""
    if connection.execute("SELECT 1 FROM tried_dirty LIMIT 1").fetchone() is None:
        return
    (threshold,) = connection.execute("SELECT value FROM tried_threshold").fetchone()
    connection.execute("DELETE FROM tried_step WHERE (task_id, step) IN (SELECT task_id, step FROM tried_dirty)")
    connection.execute(_COUNT, {"threshold": threshold})
    connection.execute(f"DELETE FROM tried_block WHERE (task_id, block) IN ({_DIRTY_BLOCKS})")
    connection.execute(_SUM)
    connection.execute(f"DELETE FROM tried_row WHERE scope IN ({ANY}, 0, 1) AND task_id IN ({_DIRTY_TASKS})")
    connection.execute(_ADD_UP)
    connection.execute("DELETE FROM tried_dirty")


def prepare_tasks(connection: sqlite3.Connection, threshold: float) -> None:
    """Bring the tables of an opened file up to date: all is counted anew if it was with another threshold."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT value FROM tried_threshold").fetchall() != [(threshold,)]:
        for table in ("tried_step", "tried_block", "tried_row", "tried_threshold"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO tried_threshold VALUES (?)", (threshold,))
        connection.execute("INSERT OR IGNORE INTO tried_dirty SELECT DISTINCT task_id, step FROM episode")
    refresh_tasks(connection)
    connection.execute("COMMIT")


VERSION = 2
_INDEX_BYTES = 32 * 1024
"""The least size of the index of SQLite's log."""

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
"""What lists show is kept apart from the bodies, so scanning 100,000 rows reads no body."""
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
    make_empty(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        _prepare(connection, path, success_threshold)
    except sqlite3.OperationalError as error:  # locked, read-only, a full disk
        connection.close()
        raise EpisodeStoreError(f"{path} can't be written to: {_reason(error, path)}") from error
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
        connection.executescript(f"BEGIN; {_SCHEMA} {TASK_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    _check_version(connection, path)
    prepare_tasks(connection, success_threshold)


def _reason(error: sqlite3.OperationalError, path: Path) -> str:
    """SQLite calls it an I/O error, too, if the disk has no room for the log's index."""
    return str(error) if shutil.disk_usage(path.parent).free >= _INDEX_BYTES else "its disk is full: make room there"


def commit(connection: sqlite3.Connection) -> None:
    """End a transaction that added or removed episodes."""
    refresh_tasks(connection)
    connection.execute("COMMIT")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection, which sees each batch as soon as it is committed."""
    if not path.exists():
        raise EpisodeStoreError(f"{path}: no such file. Episodes are recorded while a run is going on.")
    # a pipe would hold SQLite up for good; opening the file to see what it is would drop this process's locks on it
    if not stat.S_ISREG(path.lstat().st_mode):
        raise EpisodeStoreError(f"{path} is not a regular file, which a run would have written: move it away")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError as error:  # on read-only media
        connection.close()
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise EpisodeStoreError(
                f"{path}: {_reason(error, path)}. Its newest episodes are still in {log.name}: to read "
                "them, copy the folder to where you may write"
            ) from error
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise EpisodeStoreError(f"{path}: {error}") from error
    connection.row_factory = sqlite3.Row
    connection.create_function("lower", 1, str.lower, deterministic=True)  # SQLite's own knows ASCII only
    _check_version(connection, path)
    if connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'view'").fetchone():  # its rows may never end
        connection.close()
        raise EpisodeStoreError(f"{path} has a view, which no run writes: its episodes aren't read")
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
    """Add an episode in its stored form, replacing one with the same id. Returns its row."""
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
    row = connection.execute(_INSERT, values).lastrowid
    assert row is not None
    connection.execute("INSERT INTO body (id, data) VALUES (?, ?)", (row, body))
    connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, searchable_text(episode)))
    connection.executemany("INSERT INTO agent (name, episode) VALUES (?, ?)", [(agent, row) for agent in agents])
    if query:
        question = (episode.task_id, encodable(query))
        connection.execute("INSERT OR IGNORE INTO task (task_id, query) VALUES (?, ?)", question)
    return row


def insert_task(connection: sqlite3.Connection, task: Task) -> None:
    """Add what the reader gave of a task, once. Secrets in it must already be masked."""
    task_id = encodable(task.task_id)
    if not connection.execute("SELECT 1 FROM task_record WHERE task_id = ?", (task_id,)).fetchone():
        text = json.dumps(_shortened(task.model_dump()), default=str)
        connection.execute("INSERT INTO task_record VALUES (?, ?)", (task_id, zlib.compress(text.encode())))


def read_task(data: bytes) -> Task:
    """The inverse of what `insert_task` wrote."""
    return Task.model_validate_json(inflated(data))


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


def delete_after(connection: sqlite3.Connection, step: int, *, validated: bool = True) -> None:
    """Remove the episodes of later steps; unless it was `validated`, those of the validation after this one, too."""
    later = "SELECT id FROM episode WHERE step > ? OR (step = ? AND validation = 1 AND NOT ?)"
    _delete(connection, [row[0] for row in connection.execute(later, (step, step, validated))])


def _delete(connection: sqlite3.Connection, rows: list[int]) -> None:
    for row in rows:
        (body,) = connection.execute("SELECT data FROM body WHERE id = ?", (row,)).fetchone()
        with suppress(EpisodeFormatError):  # of a damaged one, the words stay in the index
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
    if found == 0:
        raise EpisodeStoreError(f"{path} holds no episodes: no run has written to it")
    if found != VERSION:
        raise EpisodeStoreError(
            f"{path}: written in format {found}, but this ajet reads format {VERSION}. Use the version that wrote it."
        )
