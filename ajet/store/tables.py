"""`Tables`: the rows of a store, within one transaction. SQL that SQLite and PostgreSQL both understand.

Every record it returns is built anew from its row, so nobody can change what is stored through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ajet.store.records import (
    Attempt,
    Mode,
    Resources,
    Rollout,
    RolloutStatus,
    Span,
    Worker,
)
from ajet.store.rows import (
    ATTEMPT,
    BOTH,
    BOTH_WITHOUT_INPUT,
    AttemptBody,
    RolloutBody,
    Row,
    Stored,
    StoredAttempt,
    attempt_from,
    stored_from,
)
from ajet.store.states import QUEUED, deadline

MAX_MARKS = 500
"""Values in one IN (…): SQLite's limit is higher, but no statement should be compiled for thousands."""


class Connection(Protocol):
    """What `Tables` needs of a database."""

    skip_locked: str
    """Ends a SELECT of rows that this transaction will take, leaving those that another one is taking."""
    for_update: str
    """Ends a SELECT of rows that this transaction will change."""

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]: ...

    def many(self, sql: str, values: Sequence[Sequence[Any]]) -> int:
        """Run it once for each. Returns how many rows changed."""
        ...


@dataclass(slots=True)
class Events:
    """What a transaction did that others wait for."""

    queued: int = 0
    """Rollouts that were added to the queue."""
    ended: set[str] = field(default_factory=set)
    """Rollouts that have ended."""

    def __bool__(self) -> bool:
        return bool(self.queued or self.ended)


encode = msgspec.json.encode
_encode_spans = msgspec.json.Encoder().encode_lines
_decode_spans = msgspec.json.Decoder(Span).decode_lines
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_worker = msgspec.json.Decoder(Worker).decode

SORT = {
    "number": "r.number",
    "start_time": "r.start_time",
    "end_time": "coalesce(r.end_time, 0)",
    "status": "r.status",
}


class Tables:
    """The tables, within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection
        self.events = Events()

    # ------------------------------------------------------------ rollouts

    def add_rollouts(self, rollouts: Iterable[Rollout], *, queued: bool) -> None:
        place = self._last_place()
        rows = []
        for rollout in rollouts:
            body = encode(RolloutBody(rollout.input, rollout.metadata))
            place += 1
            rows.append(
                (
                    rollout.rollout_id,
                    str(rollout.status),
                    place if queued else None,
                    rollout.mode,
                    rollout.resources_id,
                    rollout.start_time,
                    rollout.end_time,
                    len(body),
                    encode(rollout.config),
                    body,
                )
            )
        self._db.many(
            "INSERT INTO rollout (rollout_id, status, queue, mode, resources_id, start_time, end_time, attempts, "
            "spans, size, config, body) VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?)",
            rows,
        )
        if queued:
            self.events.queued += len(rows)

    def rollouts(self, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True) -> dict[str, Stored]:
        """Those that exist, with their latest attempts. With `change`, nobody else changes them meanwhile. Without
        `inputs`, what they were given is not read."""
        select = BOTH if inputs else BOTH_WITHOUT_INPUT
        found: dict[str, Stored] = {}
        for chunk in _chunks(sorted(set(rollout_ids))):
            if change and self._db.for_update:
                self._lock(chunk)
            for row in self._db.rows(f"{select} WHERE r.rollout_id IN ({_marks(chunk)})", chunk):
                found[row[1]] = stored_from(row)
        return found

    def _lock(self, rollout_ids: Sequence[str]) -> None:
        """In an order of its own, so that no two transactions wait for each other. And before reading: one statement
        that locks and joins may see a new rollout with its old attempt."""
        sql = f"SELECT queue FROM rollout WHERE rollout_id IN ({_marks(rollout_ids)}) ORDER BY rollout_id"
        locked = self._db.rows(sql + self._db.for_update, rollout_ids)
        # a claim meanwhile passes over these: if they are still queued afterwards, somebody has to look again
        self.events.queued += sum(queue is not None for (queue,) in locked)

    def take_queued(self, limit: int) -> list[Stored]:
        """The queue's head. Nobody else gets these."""
        sql = f"SELECT number FROM rollout WHERE queue IS NOT NULL ORDER BY queue, number LIMIT ?{self._db.skip_locked}"
        numbers = [row[0] for row in self._db.rows(sql, (limit,))]
        taken: list[Stored] = []
        for start in range(0, len(numbers), MAX_MARKS):
            chunk = numbers[start : start + MAX_MARKS]
            rows = self._db.rows(f"{BOTH} WHERE r.number IN ({_marks(chunk)})", chunk)
            taken += [stored_from(row) for row in rows]
        return sorted(taken, key=lambda one: (one.queue, one.number))

    def save(self, changed: Sequence[Stored]) -> None:
        """Write what can change as a rollout goes on."""
        place = None
        rows = []
        for one in changed:
            status = one.rollout.status
            if status not in QUEUED:
                one.queue = None
            elif one.queue is None:
                place = (self._last_place() if place is None else place) + 1
                one.queue = place
                self.events.queued += 1
            rollout = one.rollout
            rows.append((str(status), one.queue, rollout.end_time, one.attempts, one.spans, one.size, one.number))
        self._db.many(
            "UPDATE rollout SET status = ?, queue = ?, end_time = ?, attempts = ?, spans = ?, size = ? "
            "WHERE number = ?",
            rows,
        )

    def save_given(self, one: Stored) -> None:
        """Write what a rollout was given."""
        rollout = one.rollout
        self._db.rows(
            "UPDATE rollout SET mode = ?, resources_id = ?, config = ?, body = ? WHERE number = ?",
            (
                rollout.mode,
                rollout.resources_id,
                encode(rollout.config),
                encode(RolloutBody(rollout.input, rollout.metadata)),
                one.number,
            ),
        )

    def query_rollouts(
        self,
        *,
        ids: Sequence[str] | None,
        statuses: Sequence[RolloutStatus] | None,
        modes: Sequence[Mode] | None,
        id_contains: str,
        sort_by: str,
        descending: bool,
        limit: int,
        offset: int,
    ) -> tuple[list[Stored], int]:
        """The rows of one page, and how many there are on all pages."""
        conditions, values = ["1 = 1"], list[Any]()
        for column, wanted in (("r.rollout_id", ids), ("r.status", statuses), ("r.mode", modes)):
            if wanted is not None:
                conditions.append(f"{column} IN ({_marks(wanted)})" if wanted else "1 = 0")
                values += [str(value) for value in wanted]
        if id_contains:
            conditions.append("r.rollout_id LIKE ? ESCAPE '\\'")
            values.append(_containing(id_contains))
        condition = " AND ".join(conditions)
        direction = "DESC" if descending else "ASC"
        order = f"{SORT[sort_by]} {direction}, r.number {direction}"
        total = self._db.rows(f"SELECT count(*) FROM rollout r WHERE {condition}", values)[0][0]
        sql = f"{BOTH} WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
        return [stored_from(row) for row in self._db.rows(sql, (*values, limit, offset))], int(total)

    def ended_among(self, rollout_ids: Sequence[str]) -> tuple[set[str], set[str]]:
        """Those that exist, and of these, those that have ended."""
        exist, ended = set(), set()
        for chunk in _chunks(list(rollout_ids)):
            sql = f"SELECT rollout_id, end_time FROM rollout WHERE rollout_id IN ({_marks(chunk)})"
            for rollout_id, end_time in self._db.rows(sql, chunk):
                exist.add(rollout_id)
                if end_time is not None:
                    ended.add(rollout_id)
        return exist, ended

    # ------------------------------------------------------------ attempts

    def add_attempts(self, begun: Iterable[tuple[Stored, Attempt]]) -> None:
        self._db.many(
            "INSERT INTO attempt (rollout, sequence, attempt_id, status, worker_id, owner, start_time, end_time, "
            "heard, deadline, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    one.number,
                    attempt.sequence_id,
                    attempt.attempt_id,
                    str(attempt.status),
                    attempt.worker_id,
                    one.owner,
                    attempt.start_time,
                    attempt.end_time,
                    attempt.last_heartbeat_time,
                    deadline(one.rollout.config, attempt),
                    encode(AttemptBody(attempt.metadata, attempt.result)),
                )
                for one, attempt in begun
            ],
        )

    def attempts(self, one: Stored) -> list[StoredAttempt]:
        """All attempts at a rollout."""
        sql = f"SELECT {ATTEMPT} FROM attempt a WHERE a.rollout = ? ORDER BY a.sequence"
        return [
            StoredAttempt(attempt_from(row, one.rollout.rollout_id), row[4])
            for row in self._db.rows(sql, (one.number,))
        ]

    def save_attempts(self, changed: Sequence[tuple[Stored, Attempt]], listening_since: float = 0.0) -> None:
        self._db.many(
            "UPDATE attempt SET status = ?, end_time = ?, heard = ?, deadline = ? WHERE rollout = ? AND sequence = ?",
            [
                (
                    str(attempt.status),
                    attempt.end_time,
                    attempt.last_heartbeat_time,
                    deadline(one.rollout.config, attempt, listening_since),
                    one.number,
                    attempt.sequence_id,
                )
                for one, attempt in changed
            ],
        )

    def save_attempt_bodies(self, changed: Sequence[tuple[Stored, Attempt]]) -> None:
        rows = []
        for one, attempt in changed:
            body = encode(AttemptBody(attempt.metadata, attempt.result))
            one.size += len(body)
            rows.append((body, one.number, attempt.sequence_id))
        self._db.many("UPDATE attempt SET body = ? WHERE rollout = ? AND sequence = ?", rows)

    def overdue(self, now: float, limit: int) -> list[str]:
        """Rollouts with an attempt past its deadline."""
        sql = (
            "SELECT r.rollout_id FROM attempt a JOIN rollout r ON r.number = a.rollout "
            "WHERE a.deadline <= ? ORDER BY a.deadline LIMIT ?"
        )
        return [row[0] for row in self._db.rows(sql, (now, limit))]

    def next_deadline(self) -> float | None:
        found: float | None = self._db.rows("SELECT min(deadline) FROM attempt WHERE deadline IS NOT NULL")[0][0]
        return found

    # ------------------------------------------------------------ spans

    def add_spans(self, batches: Iterable[tuple[Stored, int, Sequence[Span]]]) -> None:
        """Add spans that aren't known yet: an attempt's sequence id, and what came of it together. They share a row."""
        rows = []
        for one, attempt, spans in batches:
            body = _encode_spans(spans)
            one.size += len(body)
            rows.append((one.number, attempt, " ".join([span.span_id for span in spans]), body))
        self._db.many("INSERT INTO span_batch (rollout, attempt, ids, body) VALUES (?, ?, ?, ?)", rows)

    def span_ids(self, number: int, attempt: int) -> set[str]:
        """Of all spans of an attempt. Reads every batch of it: senders put many spans into one."""
        rows = self._db.rows("SELECT ids FROM span_batch WHERE rollout = ? AND attempt = ?", (number, attempt))
        return {span_id for (ids,) in rows for span_id in ids.split(" ")}

    def spans(self, number: int, attempt: int | None) -> list[Span]:
        """In the order of their sequence ids."""
        condition, values = ("", ()) if attempt is None else (" AND attempt = ?", (attempt,))
        sql = f"SELECT attempt, body FROM span_batch WHERE rollout = ?{condition}"
        found = [(row[0], span) for row in self._db.rows(sql, (number, *values)) for span in _decode_spans(row[1])]
        found.sort(key=lambda each: (each[1].sequence_id, each[0], each[1].span_id))
        return [span for _, span in found]

    # ------------------------------------------------------------ resources

    def add_resources(self, resources: Resources) -> None:
        self._db.rows(
            "INSERT INTO resources (resources_id, version, create_time, update_time, body) VALUES (?, ?, ?, ?, ?)",
            (
                resources.resources_id,
                resources.version,
                resources.create_time,
                resources.update_time,
                encode(resources.resources),
            ),
        )

    def query_resources(
        self, resources_id: str | None, version: int | None, limit: int, offset: int
    ) -> tuple[list[Resources], int]:
        conditions, values = ["1 = 1"], list[Any]()
        for column, wanted in (("resources_id", resources_id), ("version", version)):
            if wanted is not None:
                conditions.append(f"{column} = ?")
                values.append(wanted)
        condition = " AND ".join(conditions)
        total = self._db.rows(f"SELECT count(*) FROM resources WHERE {condition}", values)[0][0]
        rows = self._db.rows(
            "SELECT resources_id, version, create_time, update_time, body FROM resources "
            f"WHERE {condition} ORDER BY number DESC LIMIT ? OFFSET ?",
            (*values, limit, offset),
        )
        found = [
            Resources(
                resources_id=row[0],
                version=row[1],
                create_time=row[2],
                update_time=row[3],
                resources=_decode_object(bytes(row[4])),
            )
            for row in rows
        ]
        return found, int(total)

    # ------------------------------------------------------------ workers

    def worker(self, worker_id: str) -> Worker:
        """A worker that nobody heard of yet is a new one."""
        rows = self._db.rows("SELECT body FROM worker WHERE worker_id = ?", (worker_id,))
        return _decode_worker(bytes(rows[0][0])) if rows else Worker(worker_id=worker_id)

    def save_worker(self, worker: Worker) -> None:
        self._db.rows(
            "INSERT INTO worker (worker_id, status, body) VALUES (?, ?, ?) "
            "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status, body = excluded.body",
            (worker.worker_id, str(worker.status), encode(worker)),
        )

    def query_workers(
        self, statuses: Sequence[str] | None, id_contains: str, limit: int, offset: int
    ) -> tuple[list[Worker], int]:
        conditions, values = ["1 = 1"], list[Any]()
        if statuses is not None:
            conditions.append(f"status IN ({_marks(statuses)})" if statuses else "1 = 0")
            values += [str(status) for status in statuses]
        if id_contains:
            conditions.append("worker_id LIKE ? ESCAPE '\\'")
            values.append(_containing(id_contains))
        condition = " AND ".join(conditions)
        total = self._db.rows(f"SELECT count(*) FROM worker WHERE {condition}", values)[0][0]
        rows = self._db.rows(
            f"SELECT body FROM worker WHERE {condition} ORDER BY worker_id LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [_decode_worker(bytes(row[0])) for row in rows], int(total)

    # ------------------------------------------------------------ requests that were answered

    def answered(self, request_id: str) -> bytes | None:
        rows = self._db.rows("SELECT answer FROM request WHERE request_id = ?", (request_id,))
        return bytes(rows[0][0]) if rows else None

    def remember(self, request_id: str, answer: bytes, now: float) -> bool:
        """False if another transaction has just answered this request."""
        sql = "INSERT INTO request (request_id, done, answer) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        return self._db.many(sql, [(request_id, now, answer)]) == 1

    # ------------------------------------------------------------ keeping and deleting

    def forget_requests(self, before: float) -> None:
        self._db.rows("DELETE FROM request WHERE done < ?", (before,))

    def oldest_ended(self, before: float, limit: int) -> list[tuple[int, int]]:
        """Number and size of rollouts that had ended by then, the oldest first. Never of those that haven't ended."""
        sql = "SELECT number, size FROM rollout WHERE end_time <= ? ORDER BY end_time LIMIT ?"
        return [(row[0], row[1]) for row in self._db.rows(sql, (before, limit))]

    def delete(self, numbers: Sequence[int]) -> None:
        for table, column in (("span_batch", "rollout"), ("attempt", "rollout"), ("rollout", "number")):
            self._db.many(f"DELETE FROM {table} WHERE {column} = ?", [(number,) for number in numbers])

    def stored_bytes(self) -> int:
        return int(self._db.rows("SELECT coalesce(sum(size), 0) FROM rollout")[0][0])

    def counts(self, table: Literal["rollout", "worker"]) -> dict[str, int]:
        """By status."""
        return {row[0]: int(row[1]) for row in self._db.rows(f"SELECT status, count(*) FROM {table} GROUP BY status")}

    # ------------------------------------------------------------ keys

    def access_keys(self) -> list[Row]:
        """name, digest, roles, created, expires"""
        return self._db.rows("SELECT name, digest, roles, created, expires FROM access_key ORDER BY created, name")

    def add_access_key(self, name: str, digest: str, roles: str, created: float, expires: float | None) -> None:
        self._db.rows("INSERT INTO access_key VALUES (?, ?, ?, ?, ?)", (name, digest, roles, created, expires))

    def expire_access_keys(self, name: str, when: float) -> int:
        """They are valid until then at most."""
        sql = "UPDATE access_key SET expires = ? WHERE name = ? AND (expires IS NULL OR expires > ?)"
        return self._db.many(sql, [(when, name, when)])

    def _last_place(self) -> int:
        """The queue's tail. Two transactions of PostgreSQL may get the same: their rollouts are then as old."""
        return int(self._db.rows("SELECT coalesce(max(queue), 0) FROM rollout WHERE queue IS NOT NULL")[0][0])


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _chunks(values: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(values), MAX_MARKS):
        yield values[start : start + MAX_MARKS]


def _containing(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


Work = Callable[[Tables], Any]
