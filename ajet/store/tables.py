"""`Tables`: what a store holds, within one transaction. The contract between what requests do and where it is kept.

Rows in and rows out, no decisions: `ajet/store/operations.py` and `ajet/store/states.py` make them. Records go in and
out by value. JSON that it returns is the caller's own, so nobody can change what is stored through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ajet.store.records import Attempt, Resources, Rollout, Span, Worker
from ajet.store.requests import QueryResources, QueryRollouts, QueryWorkers
from ajet.store.rows import Row, Stored, StoredAttempt


@dataclass(slots=True)
class Events:
    """What a transaction did that others wait for."""

    queued: int = 0
    """Rollouts that were added to the queue."""
    ended: set[str] = field(default_factory=set)
    """Rollouts that have ended."""

    def __bool__(self) -> bool:
        return bool(self.queued or self.ended)


class Tables(Protocol):
    """The tables, within one transaction."""

    events: Events

    # ------------------------------------------------------------ rollouts

    def add_rollouts(self, rollouts: Sequence[Rollout], place: int | None) -> None:
        """New ones: queued from this place on, or not queued."""
        ...

    def last_place(self) -> int:
        """The queue's tail. Two transactions of PostgreSQL may get the same: their rollouts are then as old."""
        ...

    def rollouts(self, rollout_ids: Iterable[str], *, change: bool = False, inputs: bool = True) -> dict[str, Stored]:
        """Those that exist, with their latest attempts. With `change`, nobody else changes them meanwhile. Without
        `inputs`, what they were given is left out: it is read for those who return it."""
        ...

    def head_of_queue(self, limit: int) -> list[Stored]:
        """The next to be claimed, in their order. Nobody else gets these."""
        ...

    def save(self, changed: Sequence[Stored]) -> None:
        """Write what changes as a rollout goes on: status, end and place in the queue, and the counts."""
        ...

    def save_given(self, one: Stored) -> None:
        """Write what a rollout was given."""
        ...

    def query_rollouts(self, query: QueryRollouts) -> tuple[list[Stored], int]:
        """The rows of one page, and how many there are on all pages."""
        ...

    def known(self, rollout_ids: Iterable[str]) -> set[str]:
        """Those that exist."""
        ...

    # ------------------------------------------------------------ attempts

    def add_attempts(self, begun: Sequence[tuple[Stored, Attempt]]) -> None: ...

    def attempts(self, one: Stored) -> list[StoredAttempt]:
        """All attempts at a rollout, the first one first."""
        ...

    def save_attempts(self, changed: Sequence[tuple[Stored, Attempt]], listening_since: float = 0.0) -> None:
        """Write what changes as an attempt goes on: status, end, last sign of life, and the deadline they make."""
        ...

    def save_attempt_bodies(self, changed: Sequence[tuple[Stored, Attempt]]) -> None:
        """Write metadata and results. Their rollouts grow by them."""
        ...

    def overdue(self, now: float, limit: int) -> list[str]:
        """Rollouts with an attempt past its deadline."""
        ...

    def next_deadline(self) -> float | None: ...

    # ------------------------------------------------------------ spans

    def add_spans(self, batches: Iterable[tuple[Stored, int, Sequence[Span]]]) -> None:
        """Add spans that aren't known yet: an attempt's sequence id, and what came of it together. Their rollouts grow
        by them."""
        ...

    def span_ids(self, number: int, attempt: int) -> set[str]:
        """Of all spans of an attempt."""
        ...

    def spans(self, number: int, attempt: int | None) -> list[Span]:
        """In the order of their sequence ids."""
        ...

    # ------------------------------------------------------------ resources, workers

    def add_resources(self, resources: Resources) -> None: ...

    def query_resources(self, query: QueryResources) -> tuple[list[Resources], int]:
        """The newest first: one page, and how many there are on all pages."""
        ...

    def worker(self, worker_id: str) -> Worker:
        """A worker that nobody heard of yet is a new one."""
        ...

    def save_worker(self, worker: Worker) -> None: ...

    def query_workers(self, query: QueryWorkers) -> tuple[list[Worker], int]:
        """By their ids: one page, and how many there are on all pages."""
        ...

    # ------------------------------------------------------------ requests that were answered

    def answered(self, request_id: str) -> bytes | None: ...

    def remember(self, request_id: str, answer: bytes, now: float) -> bool:
        """False if another transaction has just answered this request."""
        ...

    # ------------------------------------------------------------ keeping and deleting

    def forget_requests(self, before: float) -> None: ...

    def oldest_ended(self, before: float, limit: int) -> list[tuple[int, int]]:
        """Number and size of rollouts that had ended by then, the oldest first. Never of those that haven't ended."""
        ...

    def delete(self, numbers: Sequence[int]) -> None:
        """Rollouts, with their attempts and spans."""
        ...

    def stored_bytes(self) -> int: ...

    def counts(self, table: Literal["rollout", "worker"]) -> dict[str, int]:
        """By status."""
        ...

    # ------------------------------------------------------------ keys

    def access_keys(self) -> list[Row]:
        """name, digest, roles, created, expires"""
        ...

    def add_access_key(self, name: str, digest: str, roles: str, created: float, expires: float | None) -> None: ...

    def expire_access_keys(self, name: str, when: float) -> int:
        """They are valid until then at most. Returns how many changed."""
        ...
