"""What is kept about each task's attempts beside the episodes, so that a list of 100,000 tasks opens at once.

`tried_step` has a row for a task's attempts of one step, `tried_block` for those of some steps in a row, and
`tried_row` for all. Triggers note in `tried_dirty` which steps of which tasks an added, changed or deleted episode
concerns, whichever program wrote it; `refresh` counts those again, in the writer's transaction. Where a note is left,
or the tables were made with another threshold, readers count the episodes themselves.

An attempt is an episode of the task; those that were stopped because nobody needed them any more don't count. Shares
and means are over usable attempts, those with a reward. One is solved if the workflow or judge said so; where neither
did, if its reward reaches the threshold.
"""

from __future__ import annotations

import sqlite3
from typing import Final

ANY: Final = -1
"""The scope of all attempts; 0 is that of training's, 1 that of validation's."""
SHIFT: Final = 6
"""A block has 2^6 steps: a task of 10,000 steps is summed from 64 of them and from 157 blocks."""

_WATCHED = "task_id, step, validation, status, success, reward, tag, preview"
_NOTE = "INSERT OR IGNORE INTO tried_dirty VALUES ({row}.task_id, {row}.step);"

SCHEMA = f"""
CREATE INDEX IF NOT EXISTS episode_task_step ON episode (task_id, step);
DROP INDEX IF EXISTS episode_task;
DROP TRIGGER IF EXISTS episode_added; DROP TRIGGER IF EXISTS episode_removed; DROP TRIGGER IF EXISTS episode_changed;
DROP TABLE IF EXISTS task_step; DROP TABLE IF EXISTS task_block; DROP TABLE IF EXISTS task_row;
DROP TABLE IF EXISTS task_dirty; DROP TABLE IF EXISTS task_threshold;
CREATE TABLE IF NOT EXISTS tried_step (
  task_id TEXT NOT NULL, step INTEGER NOT NULL, validation INTEGER NOT NULL,
  attempts INTEGER NOT NULL, usable INTEGER NOT NULL, solved INTEGER NOT NULL, reward REAL NOT NULL,
  first_tag TEXT NOT NULL, last_tag TEXT NOT NULL, preview TEXT NOT NULL,
  PRIMARY KEY (task_id, step, validation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_block (
  task_id TEXT NOT NULL, block INTEGER NOT NULL, validation INTEGER NOT NULL,
  attempts INTEGER NOT NULL, usable INTEGER NOT NULL, solved INTEGER NOT NULL, reward REAL NOT NULL,
  first_tag TEXT NOT NULL, last_tag TEXT NOT NULL, preview TEXT NOT NULL,
  PRIMARY KEY (task_id, block, validation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_row (
  scope INTEGER NOT NULL, task_id TEXT NOT NULL, attempts INTEGER NOT NULL, failed INTEGER NOT NULL,
  solved REAL, latest REAL, change REAL, reward REAL, last_step INTEGER NOT NULL, tag TEXT NOT NULL,
  mixed INTEGER NOT NULL, preview TEXT NOT NULL, PRIMARY KEY (scope, task_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_dirty (
  task_id TEXT NOT NULL, step INTEGER NOT NULL, PRIMARY KEY (task_id, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tried_threshold (value REAL NOT NULL);
CREATE TRIGGER IF NOT EXISTS tried_added AFTER INSERT ON episode BEGIN {_NOTE.format(row="new")} END;
CREATE TRIGGER IF NOT EXISTS tried_removed AFTER DELETE ON episode BEGIN {_NOTE.format(row="old")} END;
CREATE TRIGGER IF NOT EXISTS tried_changed AFTER UPDATE OF {_WATCHED} ON episode BEGIN
  {_NOTE.format(row="old")} {_NOTE.format(row="new")} END;
"""
"""Files of older versions lack these until they are written to again; what they hold in their place is dropped."""

SOLVED = "CASE WHEN reward IS NULL THEN 0 WHEN success IS NOT NULL THEN success ELSE reward >= :threshold END"
ATTEMPTS = f"""count(*) AS attempts, count(reward) AS usable, sum({SOLVED}) AS solved,
  sum(coalesce(reward, 0.0)) AS reward, min(tag) AS first_tag, max(tag) AS last_tag, max(preview) AS preview"""
"""What is counted of some episodes."""
STEPS = """sum(attempts) AS attempts, sum(usable) AS usable, sum(solved) AS solved, sum(reward) AS reward,
  min(first_tag) AS first_tag, max(last_tag) AS last_tag, max(preview) AS preview"""
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
    {_SHARE.format(step="last_step")} - {_SHARE.format(step="first_step")}, reward / usable, last_step, last_tag,
    first_tag != last_tag, preview FROM bounded AS whole"""


def refresh(connection: sqlite3.Connection) -> None:
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


def prepare(connection: sqlite3.Connection, threshold: float) -> None:
    """Bring the tables of an opened file up to date; all is counted anew if nothing was, or with another threshold."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("SELECT value FROM tried_threshold").fetchall() != [(threshold,)]:
        for table in ("tried_step", "tried_block", "tried_row", "tried_threshold"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO tried_threshold VALUES (?)", (threshold,))
        connection.execute("INSERT OR IGNORE INTO tried_dirty SELECT DISTINCT task_id, step FROM episode")
    refresh(connection)
    connection.execute("COMMIT")
