"""Rows of the tables `rollout` and `attempt`, the records that they hold, and the versions of the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from ajet.schema.span import JsonObject
from ajet.store.records import Attempt, AttemptStatus, Json, Rollout, RolloutConfig, RolloutStatus
from ajet.store.requests import StoreError

Row = Sequence[Any]
T = TypeVar("T")


class RolloutBody(msgspec.Struct, frozen=True, gc=False):
    input: Json
    metadata: JsonObject


class AttemptBody(msgspec.Struct, frozen=True, gc=False):
    metadata: JsonObject
    result: Json


class Stored(msgspec.Struct, gc=False):
    """A row of `rollout`, with the row of its latest attempt."""

    number: int
    rollout: Rollout
    attempt: Attempt | None
    owner: str | None
    """The key that claimed the latest attempt."""
    attempts: int
    spans: int
    """The highest sequence id given to a span."""
    size: int
    queue: int | None


class StoredAttempt(NamedTuple):
    attempt: Attempt
    owner: str | None


_decode_rollout = msgspec.json.Decoder(RolloutBody).decode
_NO_INPUT = RolloutBody(None, {})
_EMPTY_ATTEMPT = msgspec.json.encode(AttemptBody({}, None))
_ROLLOUT_STATUS = {status.value: status for status in RolloutStatus}
_ATTEMPT_STATUS = {status.value: status for status in AttemptStatus}
_decode_attempt = msgspec.json.Decoder(AttemptBody).decode

ROLLOUT = (
    "r.number, r.rollout_id, r.status, r.queue, r.mode, r.resources_id, r.start_time, r.end_time, r.attempts, r.spans, "
    "r.size, r.config, r.body"
)
ATTEMPT = "a.sequence, a.attempt_id, a.status, a.worker_id, a.owner, a.start_time, a.end_time, a.heard, a.body"
BOTH = (
    f"SELECT {ROLLOUT}, {ATTEMPT} FROM rollout r "
    "LEFT JOIN attempt a ON a.rollout = r.number AND a.sequence = r.attempts"
)
BOTH_WITHOUT_INPUT = BOTH.replace("r.body", "NULL", 1)
ROLLOUT_COLUMNS = 13
"""Columns of a rollout."""


def stored_from(row: Row) -> Stored:
    body = _NO_INPUT if row[12] is None else _decoded(_decode_rollout, row[12], row[1])
    rollout = Rollout(
        rollout_id=row[1],
        status=_ROLLOUT_STATUS[row[2]],
        mode=row[4],
        resources_id=row[5],
        start_time=row[6],
        end_time=row[7],
        config=_config(row[11]),
        input=body.input,
        metadata=body.metadata,
    )
    has_attempt = row[ROLLOUT_COLUMNS] is not None
    return Stored(
        number=row[0],
        rollout=rollout,
        attempt=attempt_from(row[ROLLOUT_COLUMNS:], rollout.rollout_id) if has_attempt else None,
        owner=row[ROLLOUT_COLUMNS + 4] if has_attempt else None,
        attempts=row[8],
        spans=row[9],
        size=row[10],
        queue=row[3],
    )


@lru_cache(maxsize=256)  # most rollouts have one of a few
def _config(data: bytes) -> RolloutConfig:
    return msgspec.json.decode(data, type=RolloutConfig)


def attempt_from(row: Row, rollout_id: str) -> Attempt:
    body = AttemptBody({}, None) if row[8] == _EMPTY_ATTEMPT else _decoded(_decode_attempt, row[8], rollout_id)
    return Attempt(
        rollout_id=rollout_id,
        sequence_id=row[0],
        attempt_id=row[1],
        status=_ATTEMPT_STATUS[row[2]],
        worker_id=row[3],
        start_time=row[5],
        end_time=row[6],
        last_heartbeat_time=row[7],
        metadata=body.metadata,
        result=body.result,
    )


def _decoded(decode: Callable[[bytes], T], body: bytes, rollout_id: str) -> T:
    """Raises a StoreError that names the rollout: those that came together with it are answered."""
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise StoreError(f"rollout {rollout_id}: what the store holds of it is damaged: {error}") from error


Run = Callable[[str], Any]

TABLES = (
    "CREATE TABLE rollout (number {serial}, rollout_id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, queue {integer}, "
    "mode TEXT, resources_id TEXT, start_time {real} NOT NULL, end_time {real}, attempts {integer} NOT NULL, "
    "spans {integer} NOT NULL, size {integer} NOT NULL, config {blob} NOT NULL, body {blob} NOT NULL)",
    "CREATE INDEX rollout_queue ON rollout (queue, number) WHERE queue IS NOT NULL",
    "CREATE INDEX rollout_status ON rollout (status, end_time)",
    "CREATE TABLE attempt (rollout {integer} NOT NULL, sequence {integer} NOT NULL, attempt_id TEXT NOT NULL, "
    "status TEXT NOT NULL, worker_id TEXT, owner TEXT, start_time {real} NOT NULL, end_time {real}, heard {real}, "
    "deadline {real}, body {blob} NOT NULL, PRIMARY KEY (rollout, sequence)) {clustered}",
    "CREATE INDEX attempt_deadline ON attempt (deadline) WHERE deadline IS NOT NULL",
    # a row for all spans of an attempt that came together
    "CREATE TABLE span_batch (number {serial}, rollout {integer} NOT NULL, attempt {integer} NOT NULL, "
    "ids TEXT NOT NULL, body {blob} NOT NULL)",
    "CREATE INDEX span_batch_attempt ON span_batch (rollout, attempt)",
    "CREATE TABLE resources (number {serial}, resources_id TEXT NOT NULL, version {integer} NOT NULL, "
    "create_time {real} NOT NULL, update_time {real} NOT NULL, body {blob} NOT NULL, UNIQUE (resources_id, version))",
    "CREATE TABLE worker (worker_id TEXT PRIMARY KEY, status TEXT NOT NULL, body {blob} NOT NULL) {clustered}",
    "CREATE TABLE request (request_id TEXT PRIMARY KEY, done {real} NOT NULL, answer {blob} NOT NULL) {clustered}",
    "CREATE INDEX request_done ON request (done)",
    "CREATE TABLE access_key (name TEXT NOT NULL, digest TEXT PRIMARY KEY, roles TEXT NOT NULL, "
    "created {real} NOT NULL, expires {real}) {clustered}",
)

VERSIONS: Mapping[int, Sequence[str]] = {2: TABLES}
"""What makes each version out of the one before; the first, which has number 2, out of nothing."""


def migrate(found: int, run: Run, where: str, versions: Mapping[int, Sequence[str]] = VERSIONS) -> int:
    """Bring a database from version `found` to the newest one. Inside the caller's transaction."""
    newest = max(versions)
    if found > newest:
        raise StoreError(
            f"{where}: written by a newer version of ajet (its tables have version {found}, this one knows {newest}). "
            "Update ajet here, or use another store"
        )
    for version in sorted(versions):
        if version > found:
            for statement in versions[version]:
                run(statement)
    return newest
