"""`Tables`: what a store holds, within one transaction, in SQL that SQLite and PostgreSQL both understand.

Rows in and rows out, no decisions: `ajet/store/operations.py` and `ajet/store/states.py` make them. Records go in and
out by value: every record that it returns is built anew from its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ajet.schema.span import Span
from ajet.store.records import Attempt, Resources, Rollout, Worker
from ajet.store.requests import QueryResources, QueryRollouts, QueryWorkers
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
from ajet.store.states import deadline

MAX_MARKS = 500
"""Values in one IN (…): SQLite's limit is higher, but no statement should be compiled for thousands."""


class SqlConnection(Protocol):
    """What `Tables` needs of a database."""

    skip_locked: str
    """Ends a SELECT of rows that this transaction will take, leaving those that another one is taking."""
    for_update: str
    """Ends a SELECT of rows that this transaction will change."""

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]: ...

    def many(self, sql: str, values: Sequence[Sequence[Any]]) -> int:
        """Run it once for each. Returns how many rows changed."""
        ...


encode = msgspec.json.encode
_encode_spans = msgspec.json.Encoder().encode_lines
_decode_spans = msgspec.json.Decoder(Span).decode_lines
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_worker = msgspec.json.Decoder(Worker).decode


@dataclass(slots=True)
class Events:
    """What a transaction did that callers may be waiting for."""

    queued: int = 0
    """Rollouts that were added to the queue."""
    ended: set[str] = field(default_factory=set)
    """Rollouts that have ended."""

    def __bool__(self) -> bool:
        return bool(self.queued or self.ended)


class Tables:
    """The tables, within one transaction."""

    def __init__(self, connection: SqlConnection) -> None:
        self._db = connection
        self.events = Events()

    # ------------------------------------------------------------ rollouts

    def add_rollouts(self, rollouts: Sequence[Rollout], place: int | None) -> None:
        """Insert rollouts: queued from this place on, or not queued if it is None."""
        rows = []
        for index, rollout in enumerate(rollouts):
            body = encode(RolloutBody(rollout.input, rollout.metadata))
            rows.append(
                (
                    rollout.rollout_id,
                    str(rollout.status),
                    None if place is None else place + index,
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

    def last_place(self) -> int:
        """The queue's tail. Two transactions of PostgreSQL may get the same: their rollouts are then as old."""
        return int(self._db.rows("SELECT coalesce(max(queue), 0) FROM rollout WHERE queue IS NOT NULL")[0][0])

    def rollouts(self, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True) -> dict[str, Stored]:
        """Return those that exist, with their latest attempts. `change` locks them until the transaction ends;
        `inputs=False` leaves out what they were given, which only requests that return it need to read."""
        select = BOTH if inputs else BOTH_WITHOUT_INPUT
        found: dict[str, Stored] = {}
        for chunk in _chunks(sorted(set(rollout_ids))):
            if change and self._db.for_update:
                self._lock(chunk)
            for row in self._db.rows(f"{select} WHERE r.rollout_id IN ({_marks(chunk)})", chunk):
                found[row[1]] = stored_from(row)
        return found

    def _lock(self, rollout_ids: Sequence[str]) -> None:
        """Lock rollouts by id, so that no two transactions wait for each other. Lock before reading: one statement that
        locks and joins may see a new rollout with its old attempt."""
        sql = f"SELECT queue FROM rollout WHERE rollout_id IN ({_marks(rollout_ids)}) ORDER BY rollout_id"
        locked = self._db.rows(sql + self._db.for_update, rollout_ids)
        # a claim meanwhile passes over these: if they are still queued afterwards, the waiting claims must look again
        self.events.queued += sum(queue is not None for (queue,) in locked)

    def head_of_queue(self, limit: int) -> list[Stored]:
        """Take the next rollouts of the queue, in order. No other transaction gets them."""
        sql = f"SELECT number FROM rollout WHERE queue IS NOT NULL ORDER BY queue, number LIMIT ?{self._db.skip_locked}"
        numbers = [row[0] for row in self._db.rows(sql, (limit,))]
        taken: list[Stored] = []
        for start in range(0, len(numbers), MAX_MARKS):
            chunk = numbers[start : start + MAX_MARKS]
            rows = self._db.rows(f"{BOTH} WHERE r.number IN ({_marks(chunk)})", chunk)
            taken += [stored_from(row) for row in rows]
        return sorted(taken, key=lambda one: (one.queue, one.number))

    def save(self, changed: Sequence[Stored]) -> None:
        """Update what changes while a rollout goes on: status, end, place in the queue, and the counts."""
        rows = [
            (str(one.rollout.status), one.queue, one.rollout.end_time, one.attempts, one.spans, one.size, one.number)
            for one in changed
        ]
        self._db.many(
            "UPDATE rollout SET status = ?, queue = ?, end_time = ?, attempts = ?, spans = ?, size = ? "
            "WHERE number = ?",
            rows,
        )

    def save_given(self, one: Stored, rollout: Rollout) -> None:
        """Update what a rollout was given, and its size by the difference."""
        before, body = (encode(RolloutBody(each.input, each.metadata)) for each in (one.rollout, rollout))
        one.rollout, one.size = rollout, one.size + len(body) - len(before)
        self._db.rows(
            "UPDATE rollout SET mode = ?, resources_id = ?, size = ?, config = ?, body = ? WHERE number = ?",
            (rollout.mode, rollout.resources_id, one.size, encode(rollout.config), body, one.number),
        )

    def query_rollouts(self, query: QueryRollouts) -> tuple[list[Stored], int]:
        """The rows of one page, and how many there are on all pages."""
        among: dict[str, Sequence[Any] | None] = {
            "r.rollout_id": query.rollout_ids,
            "r.status": query.status_in,
        }
        order = "r.number DESC" if query.descending else "r.number"
        where = _where(among, "r.rollout_id", query.id_contains)
        rows, total = self._page(BOTH, "rollout r", where, order, query)
        return [stored_from(row) for row in rows], total

    def _page(
        self,
        select: str,
        table: str,
        where: tuple[str, Sequence[Any]],
        order: str,
        query: QueryRollouts | QueryResources | QueryWorkers,
    ) -> tuple[list[Row], int]:
        condition, values = where
        total = self._db.rows(f"SELECT count(*) FROM {table} WHERE {condition}", values)[0][0]
        sql = f"{select} WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
        return self._db.rows(sql, (*values, query.limit, query.offset)), int(total)

    # ------------------------------------------------------------ attempts

    def add_attempts(self, begun: Sequence[tuple[Stored, Attempt]]) -> None:
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
        """All attempts at a rollout, the first one first."""
        sql = f"SELECT {ATTEMPT} FROM attempt a WHERE a.rollout = ? ORDER BY a.sequence"
        return [
            StoredAttempt(attempt_from(row, one.rollout.rollout_id), row[4])
            for row in self._db.rows(sql, (one.number,))
        ]

    def save_attempts(self, changed: Sequence[tuple[Stored, Attempt]], listening_since: float = 0.0) -> None:
        """Update what changes while an attempt goes on: status, end, last sign of life, and deadline."""
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

    def save_attempt_bodies(self, changed: Sequence[tuple[Stored, Attempt, Attempt]]) -> None:
        """Update metadata and results of attempts, which are given as they were and as they are, and the size of their
        rollouts by the difference."""
        rows = []
        for one, earlier, attempt in changed:
            before, body = (encode(AttemptBody(each.metadata, each.result)) for each in (earlier, attempt))
            one.size += len(body) - len(before)
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
        """Add spans that aren't known yet: an attempt's sequence id, and what came of it together, which shares a row.
        Their rollouts grow by them."""
        rows = []
        for one, attempt, spans in batches:
            body = _encode_spans(spans)
            one.size += len(body)
            rows.append((one.number, attempt, " ".join([span.span_id for span in spans]), body))
        self._db.many("INSERT INTO span_batch (rollout, attempt, ids, body) VALUES (?, ?, ?, ?)", rows)

    def span_ids(self, number: int, attempt: int) -> set[str]:
        """Return the ids of all spans of an attempt. It reads every batch; senders put many spans into one."""
        rows = self._db.rows("SELECT ids FROM span_batch WHERE rollout = ? AND attempt = ?", (number, attempt))
        return {span_id for (ids,) in rows for span_id in ids.split(" ")}

    def spans(self, number: int, attempt: int | None) -> list[Span]:
        """Return spans in the order of their sequence ids."""
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

    def query_resources(self, query: QueryResources) -> tuple[list[Resources], int]:
        """Return one page, the newest first, and how many there are on all pages."""
        wanted = {"resources_id": query.resources_id, "version": query.version}
        where = _where({column: None if value is None else [value] for column, value in wanted.items()})
        select = "SELECT resources_id, version, create_time, update_time, body FROM resources"
        rows, total = self._page(select, "resources", where, "number DESC", query)
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
        return found, total

    # ------------------------------------------------------------ workers

    def worker(self, worker_id: str) -> Worker:
        """Return a worker; an unknown id gives a new one."""
        rows = self._db.rows("SELECT body FROM worker WHERE worker_id = ?", (worker_id,))
        return _decode_worker(bytes(rows[0][0])) if rows else Worker(worker_id=worker_id)

    def save_worker(self, worker: Worker) -> None:
        self._db.rows(
            "INSERT INTO worker (worker_id, status, body) VALUES (?, ?, ?) "
            "ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status, body = excluded.body",
            (worker.worker_id, str(worker.status), encode(worker)),
        )

    def query_workers(self, query: QueryWorkers) -> tuple[list[Worker], int]:
        """Return one page, by id, and how many there are on all pages."""
        where = _where({"status": query.status_in}, "worker_id", query.id_contains)
        rows, total = self._page("SELECT body FROM worker", "worker", where, "worker_id", query)
        return [_decode_worker(bytes(row[0])) for row in rows], total

    # ------------------------------------------------------------ requests that were answered

    def answered(self, request_id: str) -> bytes | None:
        rows = self._db.rows("SELECT answer FROM request WHERE request_id = ?", (request_id,))
        return bytes(rows[0][0]) if rows else None

    def remember(self, request_id: str, answer: bytes, now: float) -> bool:
        """Store the answer. False if another transaction has just answered this request."""
        sql = "INSERT INTO request (request_id, done, answer) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        return self._db.many(sql, [(request_id, now, answer)]) == 1

    # ------------------------------------------------------------ keeping and deleting

    def forget_requests(self, before: float) -> None:
        self._db.rows("DELETE FROM request WHERE done < ?", (before,))

    def oldest_ended(self, before: float, limit: int) -> list[tuple[int, int]]:
        """Number and size of rollouts that had ended before, the oldest first."""
        sql = "SELECT number, size FROM rollout WHERE end_time <= ? ORDER BY end_time LIMIT ?"
        return [(row[0], row[1]) for row in self._db.rows(sql, (before, limit))]

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete rollouts, with their attempts and spans."""
        for table, column in (("span_batch", "rollout"), ("attempt", "rollout"), ("rollout", "number")):
            self._db.many(f"DELETE FROM {table} WHERE {column} = ?", [(number,) for number in numbers])

    def stored_bytes(self) -> int:
        return int(self._db.rows("SELECT coalesce(sum(size), 0) FROM rollout")[0][0])

    def counts(self, table: Literal["rollout", "worker"]) -> dict[str, int]:
        """How many there are of each status."""
        return {row[0]: int(row[1]) for row in self._db.rows(f"SELECT status, count(*) FROM {table} GROUP BY status")}

    # ------------------------------------------------------------ keys

    def access_keys(self) -> list[Row]:
        """name, digest, roles, created, expires"""
        return self._db.rows("SELECT name, digest, roles, created, expires FROM access_key ORDER BY created, name")

    def add_access_key(self, name: str, digest: str, roles: str, created: float, expires: float | None) -> None:
        self._db.rows("INSERT INTO access_key VALUES (?, ?, ?, ?, ?)", (name, digest, roles, created, expires))

    def expire_access_keys(self, name: str, when: float) -> int:
        """Let the keys of this name expire at `when`, if not sooner. Returns how many changed."""
        sql = "UPDATE access_key SET expires = ? WHERE name = ? AND (expires IS NULL OR expires > ?)"
        return self._db.many(sql, [(when, name, when)])


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _chunks(values: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(values), MAX_MARKS):
        yield values[start : start + MAX_MARKS]


def _where(
    among: Mapping[str, Sequence[Any] | None], searched: str = "", contains: str = ""
) -> tuple[str, Sequence[Any]]:
    """The condition that each column is among these values (None: any will do), and that one contains a text."""
    conditions, values = ["1 = 1"], list[Any]()
    for column, wanted in among.items():
        if wanted is not None:
            conditions.append(f"{column} IN ({_marks(wanted)})" if wanted else "1 = 0")
            values += [value if type(value) is int else str(value) for value in wanted]
    if contains:
        escaped = contains.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        conditions.append(f"{searched} LIKE ? ESCAPE '\\'")
        values.append(f"%{escaped}%")
    return " AND ".join(conditions), values
