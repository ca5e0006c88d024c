"""`MemoryTables`: a store's tables in plain dictionaries.

What is kept is never changed, only replaced: a transaction notes what was there before, and `undo` puts it back. What
users hand in is kept encoded, so that each reader gets a copy, and the garbage collector has nothing to look through.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from ajet.store.records import Attempt, Resources, Rollout, Span, Worker
from ajet.store.requests import QueryResources, QueryRollouts, QueryWorkers
from ajet.store.rows import AttemptBody, RolloutBody, Row, Stored, StoredAttempt
from ajet.store.states import deadline
from ajet.store.tables import Events

_encode = msgspec.json.encode
_decode_rollout = msgspec.json.Decoder(RolloutBody).decode
_decode_attempt = msgspec.json.Decoder(AttemptBody).decode
_decode_spans = msgspec.json.Decoder(list[Span]).decode
_decode_resources = msgspec.json.Decoder(Resources).decode
_decode_worker = msgspec.json.Decoder(Worker).decode
_NO_RESULT = _encode(AttemptBody({}, None))
K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()


class _Rollout(msgspec.Struct, frozen=True, gc=False):
    """A rollout without what it was given; see `Stored`."""

    number: int
    head: Rollout
    body: bytes
    attempts: int
    spans: int
    size: int
    queue: int | None


class _Attempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt without its metadata and its result."""

    head: Attempt
    body: bytes
    owner: str | None


class _Batch(NamedTuple):
    """Spans of an attempt that came together."""

    attempt: int
    ids: tuple[str, ...]
    body: bytes


@dataclass(slots=True)
class Memory:
    """Everything that a store in memory holds."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Of rollouts, by their ids."""
    rollouts: dict[int, _Rollout] = field(default_factory=dict)
    queue: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Numbers by their places, the head first."""
    ended: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, tuple[_Attempt, ...]] = field(default_factory=dict)
    """Of each rollout, the first one first."""
    deadlines: dict[tuple[int, int], float] = field(default_factory=dict)
    """Of those attempts that have one: a rollout's number and the attempt's."""
    batches: dict[int, tuple[_Batch, ...]] = field(default_factory=dict)
    resources: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """By id and version, the oldest first."""
    workers: dict[str, bytes] = field(default_factory=dict)
    requests: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    keys: dict[str, Row] = field(default_factory=dict)
    """By their digests."""
    last_number: int = 0
    last_place: int = 0


class MemoryTables:
    """The tables, within one transaction."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._before: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        self.events = Events()

    # ------------------------------------------------------------ rollouts

    def add_rollouts(self, rollouts: Sequence[Rollout], place: int | None) -> None:
        memory = self._memory
        for index, rollout in enumerate(rollouts):
            memory.last_number = number = memory.last_number + 1
            body = _encode(RolloutBody(rollout.input, rollout.metadata))
            queue = None if place is None else place + index
            head = replace(rollout, input=None, metadata={})
            self._put(memory.numbers, rollout.rollout_id, number)
            self._put(memory.rollouts, number, _Rollout(number, head, body, 0, 0, len(body), queue))
            if queue is not None:
                self._put(memory.queue, queue, number)
                memory.last_place = queue

    def last_place(self) -> int:
        return self._memory.last_place

    def rollouts(self, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True) -> dict[str, Stored]:
        numbers = self._memory.numbers
        found = {}
        for rollout_id in rollout_ids:
            number = numbers.get(rollout_id)
            if number is not None and rollout_id not in found:
                found[rollout_id] = self._stored(number, inputs)
        return found

    def head_of_queue(self, limit: int) -> list[Stored]:
        return [self._stored(number) for number in islice(self._memory.queue.values(), limit)]

    def save(self, changed: Sequence[Stored]) -> None:
        memory = self._memory
        for one in changed:
            number, rollout = one.number, one.rollout
            kept = memory.rollouts[number]
            head = kept.head
            if rollout.status is not head.status or rollout.end_time != head.end_time:
                head = replace(head, status=rollout.status, end_time=rollout.end_time)
            if one.queue != kept.queue:
                self._move(number, kept.queue, one.queue)
            if head.end_time != kept.head.end_time:
                self._put_or_drop(memory.ended, number, head.end_time)
            row = _Rollout(number, head, kept.body, one.attempts, one.spans, one.size, one.queue)
            self._put(memory.rollouts, number, row)

    def save_given(self, one: Stored) -> None:
        kept, rollout = self._memory.rollouts[one.number], one.rollout
        head = replace(kept.head, mode=rollout.mode, resources_id=rollout.resources_id, config=rollout.config)
        body = _encode(RolloutBody(rollout.input, rollout.metadata))
        self._put(self._memory.rollouts, one.number, replace(kept, head=head, body=body))

    def query_rollouts(self, query: QueryRollouts) -> tuple[list[Stored], int]:
        found = [row for row in self._rows(query.rollout_ids) if _matches(row.head, query)]
        found.sort(key=lambda row: (_sort_value(row, query.sort_by), row.number), reverse=query.descending)
        page = found[query.offset : query.offset + query.limit]
        return [self._stored(row.number) for row in page], len(found)

    def known(self, rollout_ids: Iterable[str]) -> set[str]:
        return {rollout_id for rollout_id in rollout_ids if rollout_id in self._memory.numbers}

    def _rows(self, rollout_ids: Sequence[str] | None) -> Iterable[_Rollout]:
        rollouts, numbers = self._memory.rollouts, self._memory.numbers
        if rollout_ids is None:
            return rollouts.values()
        return [rollouts[numbers[rollout_id]] for rollout_id in self.known(rollout_ids)]

    def _stored(self, number: int, inputs: bool = True) -> Stored:
        kept = self._memory.rollouts[number]
        rollout = kept.head
        if inputs:
            given = _decode_rollout(kept.body)
            rollout = replace(rollout, input=given.input, metadata=given.metadata)
        attempt = owner = None
        if kept.attempts:
            attempt, owner = _stored_attempt(self._memory.attempts[number][-1])
        return Stored(number, rollout, attempt, owner, kept.attempts, kept.spans, kept.size, kept.queue)

    def _move(self, number: int, place: int | None, to: int | None) -> None:
        """Out of the queue, or to its tail."""
        if place is not None:
            self._put_or_drop(self._memory.queue, place, None)
        if to is not None:
            self._put(self._memory.queue, to, number)
            self._memory.last_place = to

    # ------------------------------------------------------------ attempts

    def add_attempts(self, begun: Sequence[tuple[Stored, Attempt]]) -> None:
        attempts = self._memory.attempts
        for one, attempt in begun:
            new = _Attempt(attempt, _NO_RESULT, one.owner)  # it has neither metadata nor a result yet
            self._put(attempts, one.number, (*attempts.get(one.number, ()), new))
            self._set_deadline(one, attempt, 0.0)

    def attempts(self, one: Stored) -> list[StoredAttempt]:
        return [_stored_attempt(kept) for kept in self._memory.attempts.get(one.number, ())]

    def save_attempts(self, changed: Sequence[tuple[Stored, Attempt]], listening_since: float = 0.0) -> None:
        for one, attempt in changed:
            kept = self._attempt(one, attempt)
            head = replace(
                kept.head,
                status=attempt.status,
                end_time=attempt.end_time,
                last_heartbeat_time=attempt.last_heartbeat_time,
            )
            self._save_attempt(one, _Attempt(head, kept.body, kept.owner))
            self._set_deadline(one, attempt, listening_since)

    def save_attempt_bodies(self, changed: Sequence[tuple[Stored, Attempt]]) -> None:
        for one, attempt in changed:
            kept = self._attempt(one, attempt)
            body = _encode(AttemptBody(attempt.metadata, attempt.result))
            one.size += len(body)
            self._save_attempt(one, _Attempt(kept.head, body, kept.owner))

    def overdue(self, now: float, limit: int) -> list[str]:
        due = [(deadline, number) for (number, _), deadline in self._memory.deadlines.items() if deadline <= now]
        return [self._memory.rollouts[number].head.rollout_id for _, number in heapq.nsmallest(limit, due)]

    def next_deadline(self) -> float | None:
        return min(self._memory.deadlines.values(), default=None)

    def _attempt(self, one: Stored, attempt: Attempt) -> _Attempt:
        return self._memory.attempts[one.number][attempt.sequence_id - 1]

    def _save_attempt(self, one: Stored, changed: _Attempt) -> None:
        all_of_it = list(self._memory.attempts[one.number])
        all_of_it[changed.head.sequence_id - 1] = changed
        self._put(self._memory.attempts, one.number, tuple(all_of_it))

    def _set_deadline(self, one: Stored, attempt: Attempt, listening_since: float) -> None:
        when = deadline(one.rollout.config, attempt, listening_since)
        self._put_or_drop(self._memory.deadlines, (one.number, attempt.sequence_id), when)

    # ------------------------------------------------------------ spans

    def add_spans(self, batches: Iterable[tuple[Stored, int, Sequence[Span]]]) -> None:
        kept = self._memory.batches
        for one, attempt, spans in batches:
            body = _encode(spans)
            one.size += len(body)
            batch = _Batch(attempt, tuple([span.span_id for span in spans]), body)
            self._put(kept, one.number, (*kept.get(one.number, ()), batch))

    def span_ids(self, number: int, attempt: int) -> set[str]:
        return {span_id for batch in self._batches(number, attempt) for span_id in batch.ids}

    def spans(self, number: int, attempt: int | None) -> list[Span]:
        found = [(each.attempt, span) for each in self._batches(number, attempt) for span in _decode_spans(each.body)]
        found.sort(key=lambda each: (each[1].sequence_id, each[0], each[1].span_id))
        return [span for _, span in found]

    def _batches(self, number: int, attempt: int | None) -> Iterator[_Batch]:
        return (each for each in self._memory.batches.get(number, ()) if attempt is None or each.attempt == attempt)

    # ------------------------------------------------------------ resources, workers

    def add_resources(self, resources: Resources) -> None:
        self._put(self._memory.resources, (resources.resources_id, resources.version), _encode(resources))

    def query_resources(self, query: QueryResources) -> tuple[list[Resources], int]:
        kept = self._memory.resources
        if query.resources_id is None and query.version is None:  # asked whenever rollouts are enqueued
            page = islice(reversed(kept.values()), query.offset, query.offset + query.limit)
            return [_decode_resources(body) for body in page], len(kept)
        found = [
            body
            for (resources_id, version), body in reversed(kept.items())
            if query.resources_id in (None, resources_id) and query.version in (None, version)
        ]
        return [_decode_resources(body) for body in found[query.offset : query.offset + query.limit]], len(found)

    def worker(self, worker_id: str) -> Worker:
        kept = self._memory.workers.get(worker_id)
        return Worker(worker_id=worker_id) if kept is None else _decode_worker(kept)

    def save_worker(self, worker: Worker) -> None:
        self._put(self._memory.workers, worker.worker_id, _encode(worker))

    def query_workers(self, query: QueryWorkers) -> tuple[list[Worker], int]:
        found = [
            worker
            for worker in self._workers()
            if (query.status_in is None or worker.status in query.status_in) and query.id_contains in worker.worker_id
        ]
        found.sort(key=lambda worker: worker.worker_id)
        return found[query.offset : query.offset + query.limit], len(found)

    def _workers(self) -> Iterator[Worker]:
        return map(_decode_worker, self._memory.workers.values())

    # ------------------------------------------------------------ requests that were answered

    def answered(self, request_id: str) -> bytes | None:
        kept = self._memory.requests.get(request_id)
        return None if kept is None else kept[1]

    def remember(self, request_id: str, answer: bytes, now: float) -> bool:
        self._put(self._memory.requests, request_id, (now, answer))
        return True

    # ------------------------------------------------------------ keeping and deleting

    def forget_requests(self, before: float) -> None:
        requests = self._memory.requests
        while requests:
            request_id, (done, _) = next(iter(requests.items()))
            if done >= before:
                return
            self._put_or_drop(requests, request_id, None)

    def oldest_ended(self, before: float, limit: int) -> list[tuple[int, int]]:
        ended = ((end_time, number) for number, end_time in self._memory.ended.items() if end_time <= before)
        return [(number, self._memory.rollouts[number].size) for _, number in heapq.nsmallest(limit, ended)]

    def delete(self, numbers: Sequence[int]) -> None:
        memory = self._memory
        tables: tuple[dict[int, Any], ...] = (memory.rollouts, memory.ended, memory.attempts, memory.batches)
        for number in numbers:
            kept = memory.rollouts[number]
            self._put_or_drop(memory.numbers, kept.head.rollout_id, None)
            for attempt in memory.attempts.get(number, ()):
                self._put_or_drop(memory.deadlines, (number, attempt.head.sequence_id), None)
            for table in tables:
                self._put_or_drop(table, number, None)

    def stored_bytes(self) -> int:
        return sum(row.size for row in self._memory.rollouts.values())

    def counts(self, table: Literal["rollout", "worker"]) -> dict[str, int]:
        if table == "worker":
            return Counter(str(worker.status) for worker in self._workers())
        return Counter(str(row.head.status) for row in self._memory.rollouts.values())

    # ------------------------------------------------------------ keys

    def access_keys(self) -> list[Row]:
        return sorted(self._memory.keys.values(), key=lambda row: (row[3], row[0]))

    def add_access_key(self, name: str, digest: str, roles: str, created: float, expires: float | None) -> None:
        self._put(self._memory.keys, digest, (name, digest, roles, created, expires))

    def expire_access_keys(self, name: str, when: float) -> int:
        changed = [row for row in self.access_keys() if row[0] == name and (row[4] is None or row[4] > when)]
        for row in changed:
            self._put(self._memory.keys, row[1], (*row[:4], when))
        return len(changed)

    # ------------------------------------------------------------ the transaction

    def undo(self) -> None:
        """Put back what was there before."""
        for table, key, value in reversed(self._before):
            if value is _ABSENT:
                del table[key]
            else:
                table[key] = value
        for place in sorted(self._memory.queue):  # those put back came to its end
            self._memory.queue.move_to_end(place)

    def _put(self, table: MutableMapping[K, V], key: K, value: V) -> None:
        self._before.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def _put_or_drop(self, table: MutableMapping[K, V], key: K, value: V | None) -> None:
        if value is not None:
            self._put(table, key, value)
        elif key in table:
            self._before.append((table, key, table.pop(key)))


def _stored_attempt(kept: _Attempt) -> StoredAttempt:
    body = AttemptBody({}, None) if kept.body == _NO_RESULT else _decode_attempt(kept.body)
    return StoredAttempt(replace(kept.head, metadata=body.metadata, result=body.result), kept.owner)


def _matches(rollout: Rollout, query: QueryRollouts) -> bool:
    return (
        (query.status_in is None or rollout.status in query.status_in)
        and (query.mode_in is None or rollout.mode in query.mode_in)
        and query.id_contains in rollout.rollout_id
    )


def _sort_value(row: _Rollout, sort_by: str) -> Any:
    if sort_by == "number":
        return row.number
    value = getattr(row.head, sort_by)
    return 0 if value is None else value
