"""Writing and removing the rows of an episode. Called by the recorder, inside its transaction."""

from __future__ import annotations

import json
import sqlite3

from ajet.observe.episode_codec import Annotation, decode_episode
from ajet.observe.episode_text import one_line, preview, searchable_text
from ajet.schema.episode import Episode

_COLUMNS = (
    "episode_id", "step", "validation", "task_id", "group_id", "repeat", "tag", "status", "outcomes", "failure",
    "reward", "success", "agents", "calls", "turns", "tokens", "sampled", "trained", "forks", "attempts", "seconds",
    "recorded", "preview",
)  # fmt: skip
_INSERT = f"INSERT INTO episode ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def insert_episode(
    connection: sqlite3.Connection,
    episode: Episode,
    body: bytes,
    step: int,
    validation: bool,
    query: str,
    recorded: float,
) -> None:
    """Add an episode; one with the same id is replaced."""
    tree = episode.tree
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
        connection.execute("INSERT OR IGNORE INTO task (task_id, query) VALUES (?, ?)", (episode.task_id, query))


def insert_annotation(connection: sqlite3.Connection, episode_id: str, annotation: Annotation, data: bytes) -> bool:
    """Add credit or trainer logprobs to a recorded episode; false if it is not there."""
    found = connection.execute("SELECT id FROM episode WHERE episode_id = ?", (episode_id,)).fetchone()
    if not found:
        return False
    connection.execute("INSERT OR REPLACE INTO annotation (id, data) VALUES (?, ?)", (found[0], data))
    trained = [call.advantage for call in annotation.credit or [] if call.entries]
    if trained:
        mean = sum(trained) / len(trained)
        connection.execute("UPDATE episode SET advantage = ? WHERE id = ?", (mean, found[0]))
    return True


def delete_oldest(connection: sqlite3.Connection, count: int) -> int:
    """Remove the oldest episodes; how many were removed."""
    rows = [row[0] for row in connection.execute("SELECT id FROM episode ORDER BY id LIMIT ?", (count,))]
    _delete(connection, rows)
    return len(rows)


def rewind(connection: sqlite3.Connection, step: int) -> bool:
    """Remove the episodes of later steps."""
    _delete(connection, [row[0] for row in connection.execute("SELECT id FROM episode WHERE step > ?", (step,))])
    return True


def _delete(connection: sqlite3.Connection, rows: list[int]) -> None:
    for row in rows:
        (body,) = connection.execute("SELECT data FROM body WHERE id = ?", (row,)).fetchone()
        # an index without content is told what to forget
        text = searchable_text(decode_episode(body))
        connection.execute("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (row, text))
        connection.execute("DELETE FROM agent WHERE episode = ?", (row,))
        for table in ("body", "annotation", "episode"):
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (row,))
