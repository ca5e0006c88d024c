"""Rows of the tables `rollout` and `attempt`: their columns, and the records that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from ajet.store.records import Attempt, AttemptStatus, Json, JsonObject, Rollout, RolloutConfig, RolloutStatus

Row = Sequence[Any]


class RolloutBody(msgspec.Struct, frozen=True, gc=False):
    input: Json
    metadata: JsonObject


class AttemptBody(msgspec.Struct, frozen=True, gc=False):
    metadata: JsonObject
    result: Json


class Stored(msgspec.Struct, gc=False):
    """A rollout in its table, with its latest attempt."""

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
    body = _NO_INPUT if row[12] is None else _decode_rollout(row[12])
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
    body = AttemptBody({}, None) if row[8] == _EMPTY_ATTEMPT else _decode_attempt(row[8])
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
