"""`EpisodeStore`: reads a run's `episodes.sqlite`, during the run or after. It never writes.

Lists come from narrow rows that the database filters and sorts; an episode's body is decoded only by `get` and `all`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ajet.observe.episode_codec import Annotation, decode_annotation, decode_episode, query_of, words
from ajet.observe.episode_tables import SOLVED, EpisodeStoreError, open_for_reading, read_task
from ajet.schema.episode import Episode
from ajet.schema.errors import EpisodeFormatError, UserError
from ajet.schema.task import Task

SortKey = Literal[
    "id", "step", "task_id", "reward", "advantage", "status", "turns", "calls", "tokens", "sampled", "trained", "forks",
    "seconds", "tag",
]  # fmt: skip
SORT_KEYS: tuple[str, ...] = get_args(SortKey)
_NOTHING: Mapping[str, Any] = {}


class EpisodeNotFoundError(UserError):
    """No such episode: never recorded, not kept by the settings, or deleted to make room for newer ones."""


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes. None and '' match all."""

    step_min: int | None = None
    step_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    task: str = ""
    group: str = ""
    status: str = ""
    agent: str = ""
    tag: str = ""
    failure: str = ""
    success: bool | None = None
    """Whether they succeeded, as the metrics count it: what has no reward didn't."""
    threshold: float = 1.0
    """The reward that is a success where neither workflow nor judge said so."""
    validation: bool | None = None
    mixed: bool | None = None
    """Only groups whose episodes have different rewards (True), or the same (False)."""
    ids: tuple[str, ...] | None = None
    """Only these episodes."""
    text: str = ""
    """Words that must all occur in the messages; the last one may be incomplete. Quotes make a phrase."""


@dataclass(slots=True)
class RecordedEpisode:
    """An episode and what was recorded about it."""

    episode: Episode
    step: int
    validation: bool
    recorded: float
    query: str
    annotation: Annotation


@dataclass(slots=True)
class Facets:
    """The values to filter by, with counts."""

    total: int = 0
    last_step: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    agents: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


class EpisodeStore:
    """Reads one file. Any thread may call any method."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = open_for_reading(path)
        self._lock = threading.Lock()
        self._facets: tuple[int, Facets] | None = None

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let one thread read at a time. A part of the file may be damaged although it could be opened."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise EpisodeStoreError(f"{self.path}: {error}") from error

    def page(
        self,
        where: EpisodeFilter | None = None,
        *,
        sort: SortKey = "id",
        descending: bool = True,
        offset: int = 0,
        limit: int = 100,
    ) -> tuple[list[dict[str, Any]], int]:
        """The rows of one page, and the number of rows on all pages."""
        if sort not in SORT_KEYS:
            raise ValueError(f"can't sort by {sort!r}; sort keys: {', '.join(SORT_KEYS)}")
        condition, values = _condition(where or EpisodeFilter())
        direction = "DESC" if descending else "ASC"
        order = f"{sort} IS NULL, {sort} {direction}, id {direction}"
        with self._reading():
            total = self._connection.execute(f"SELECT count(*) FROM episode WHERE {condition}", values).fetchone()[0]
            # the page's ids first: sorting whole rows would move their text along
            rows = self._connection.execute(
                f"SELECT * FROM episode WHERE id IN (SELECT id FROM episode WHERE {condition} "
                f"ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
                (*values, limit, offset),
            ).fetchall()
        return [_row(row) for row in rows], int(total)

    def ids(self, where: EpisodeFilter | None = None) -> list[str]:
        """The ids of these episodes, in the order of recording."""
        condition, values = _condition(where or EpisodeFilter())
        with self._reading():
            query = f"SELECT episode_id FROM episode WHERE {condition} ORDER BY id"
            return [row[0] for row in self._connection.execute(query, values)]

    def get(self, episode_id: str) -> RecordedEpisode:
        """One episode with everything known about it."""
        with self._reading():
            row = self._connection.execute(
                "SELECT step, validation, recorded, preview, body.data AS body, annotation.data AS annotation, query "
                "FROM episode JOIN body USING (id) LEFT JOIN annotation USING (id) LEFT JOIN task USING (task_id) "
                "WHERE episode_id = ?",
                (episode_id,),
            ).fetchone()
        if row is None:
            raise EpisodeNotFoundError(
                f"no episode {episode_id!r} in {self.path}: it was never recorded, ajet.recorder.keep left it out, "
                f"or it was deleted to make room for newer ones (ajet.recorder.max_gb)"
            )
        try:
            episode = decode_episode(row["body"])
            annotation = decode_annotation(row["annotation"]) if row["annotation"] else Annotation()
        except EpisodeFormatError as error:
            raise EpisodeStoreError(f"{self.path}: episode {episode_id!r}: {error}") from error
        return RecordedEpisode(
            episode=episode,
            step=row["step"],
            validation=bool(row["validation"]),
            recorded=row["recorded"],
            query=query_of(episode, row["query"], row["preview"]),
            annotation=annotation,
        )

    def has(self, episode_id: str) -> bool:
        """Whether this episode is recorded."""
        return bool(self.rows("SELECT 1 FROM episode WHERE episode_id = :id", {"id": episode_id}))

    def all(self, where: EpisodeFilter | None = None) -> Iterator[RecordedEpisode]:
        """These episodes, one at a time."""
        for episode_id in self.ids(where):
            yield self.get(episode_id)

    def neighbours(self, episode_id: str) -> tuple[str | None, str | None]:
        """The episodes recorded before and after this one."""
        query = (
            "SELECT (SELECT episode_id FROM episode WHERE id < this.id ORDER BY id DESC LIMIT 1), "
            "(SELECT episode_id FROM episode WHERE id > this.id ORDER BY id LIMIT 1) "
            "FROM episode AS this WHERE episode_id = :id"
        )
        before, after = next(iter(self.rows(query, {"id": episode_id})), (None, None))
        return before, after

    def task(self, task_id: str) -> Task | None:
        """What the reader gave of a task; None if it was not recorded."""
        return self.tasks([task_id]).get(task_id)

    def tasks(self, task_ids: Sequence[str]) -> dict[str, Task]:
        """What the reader gave of these tasks, as far as it was recorded."""
        query = "SELECT task_id, data FROM task_record WHERE task_id IN (SELECT value FROM json_each(:ids))"
        try:
            return {row[0]: read_task(row[1]) for row in self.rows(query, {"ids": json.dumps(list(task_ids))})}
        except (zlib.error, ValueError) as error:
            raise EpisodeStoreError(f"{self.path}: the record of a task is damaged: {error}") from error

    def rows(self, query: str, values: Mapping[str, Any] = _NOTHING) -> list[Any]:
        """The rows of a query of ours; what users gave comes in `values` only."""
        with self._reading():
            return self._connection.execute(query, values).fetchall()

    def token_bytes(self, ids: list[int]) -> dict[int, bytes]:
        """The bytes of these token ids, without ids recorded before a tokenizer was known."""
        query = "SELECT id, bytes FROM token WHERE id IN (SELECT value FROM json_each(:ids))"
        return dict(self.rows(query, {"ids": json.dumps(ids)}))

    def facets(self) -> Facets:
        """The values to filter by, counted again only after something was written."""
        with self._reading():
            version = self._connection.execute("PRAGMA data_version").fetchone()[0]
            if self._facets is None or self._facets[0] != version:
                self._facets = (version, self._count())
            return self._facets[1]

    def _count(self) -> Facets:
        total, newest = self._connection.execute(
            # each part comes from an index, none from the rows
            "SELECT count(*), (SELECT coalesce(max(step), 0) FROM episode) FROM episode"
        ).fetchone()
        return Facets(
            total=total,
            last_step=newest,
            statuses=self._counts("SELECT status, count(*) FROM episode GROUP BY status"),
            tags=self._counts("SELECT tag, count(*) FROM episode WHERE tag != '' GROUP BY tag"),
            agents=self._counts("SELECT name, count(*) FROM agent GROUP BY name"),
            # a cancellation follows from something else
            failures=self._counts(
                "SELECT failure, count(*) FROM episode WHERE failure != '' AND status != 'cancelled' GROUP BY failure"
            ),
        )

    def _counts(self, query: str) -> dict[str, int]:
        return {row[0]: row[1] for row in self._connection.execute(f"{query} ORDER BY 2 DESC LIMIT 200")}


def _row(row: Any) -> dict[str, Any]:
    record = dict(row)
    record["agents"] = json.loads(record["agents"])
    record["outcomes"] = record["outcomes"].split()
    record["validation"] = bool(record["validation"])
    record["success"] = None if record["success"] is None else bool(record["success"])
    return record


def _condition(where: EpisodeFilter) -> tuple[str, list[Any]]:
    clauses: list[str] = []
    values: list[Any] = []

    def add(clause: str, *given: Any) -> None:
        clauses.append(clause)
        values.extend(given)

    for column, low, high in (("step", where.step_min, where.step_max), ("reward", where.reward_min, where.reward_max)):
        if low is not None:
            add(f"{column} >= ?", low)
        if high is not None:
            add(f"{column} <= ?", high)
    equal = (
        ("task_id", where.task), ("group_id", where.group), ("status", where.status), ("tag", where.tag),
        ("failure", where.failure),
    )  # fmt: skip
    for column, wanted in equal:
        if wanted:
            add(f"{column} = ?", wanted)
    if where.success is not None:
        add(f"({SOLVED.replace(':threshold', '?')}) = ?", where.threshold, int(where.success))
    if where.validation is not None:
        add("validation = ?", int(where.validation))
    if where.mixed is not None:
        sign = "<" if where.mixed else "="
        groups = "SELECT group_id FROM episode WHERE group_id != '' GROUP BY group_id"
        add(f"group_id IN ({groups} HAVING min(reward) {sign} max(reward))")
    if where.agent:
        add("id IN (SELECT episode FROM agent WHERE name = ?)", where.agent)
    if where.ids is not None:
        add("episode_id IN (SELECT value FROM json_each(?))", json.dumps(where.ids))
    match = _match(where.text)
    if match:
        add("id IN (SELECT rowid FROM words WHERE words MATCH ?)", match)
    return " AND ".join(clauses) or "1", values


def _match(text: str) -> str:
    """A query in the index's own language, in which the user's text is always quoted."""
    phrases: list[str] = []
    for index, part in enumerate(text.replace("\0", " ").split('"')):
        pieces = [part] if index % 2 else part.split()
        phrases.extend(" ".join(words(piece).split()) for piece in pieces)
    wanted = [f'"{phrase}"' for phrase in phrases if any(character.isalnum() for character in phrase)]
    if wanted and not text.endswith((" ", '"')):
        wanted[-1] += "*"
    return " AND ".join(wanted)
