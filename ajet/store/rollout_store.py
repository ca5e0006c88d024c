"""`RolloutStore`: the methods of every store, in this process or behind a URL. All are coroutines.

A subclass says how a request is carried out (`_do`). `BlockingStore` has the same methods for code without an event
loop.
"""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from msgspec import UNSET, UnsetType

from ajet.schema.span import JsonObject, Span
from ajet.store import requests as ask
from ajet.store.records import (
    Attempt,
    AttemptedRollout,
    Json,
    Mode,
    Page,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Statistics,
    Worker,
    WorkerStatus,
)
from ajet.store.requests import AttemptRef, AttemptUpdate, NewRollout, StoreError, StoreRequest

T = TypeVar("T")


def new_request_id() -> str:
    """Make an id under which a request can be repeated."""
    return f"rq-{uuid.uuid4().hex}"


class RolloutStore(ABC):
    """An asynchronous context manager; `aclose` ends it."""

    @abstractmethod
    async def _do(self, request: StoreRequest[T]) -> T:
        """Carry out a request. Raises a StoreError."""

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------ for programs that want rollouts

    async def enqueue(self, rollouts: Sequence[NewRollout], *, request_id: str | None = None) -> list[Rollout]:
        """Add rollouts to the queue's end, in this order."""
        return await self._do(ask.Enqueue(rollouts=list(rollouts), request_id=request_id or new_request_id()))

    async def enqueue_one(
        self,
        input: Json,
        *,
        mode: Mode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: JsonObject | None = None,
    ) -> Rollout:
        """Add one rollout."""
        new = NewRollout(
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=metadata or {},
        )
        return (await self.enqueue([new]))[0]

    async def start_rollout(
        self, rollout: NewRollout, *, worker_id: str | None = None, request_id: str | None = None
    ) -> AttemptedRollout:
        """Start a rollout at once, without the queue: its first attempt begins now."""
        request_id = request_id or new_request_id()
        return await self._do(ask.StartRollout(rollout=rollout, worker_id=worker_id, request_id=request_id))

    async def start_attempt(
        self, rollout_id: str, *, worker_id: str | None = None, request_id: str | None = None
    ) -> AttemptedRollout:
        """Start another attempt, whatever `max_attempts` says, and cancel the one that is running. Raises ConflictError
        if the rollout has succeeded or was cancelled."""
        request_id = request_id or new_request_id()
        return await self._do(ask.StartAttempt(rollout_id=rollout_id, worker_id=worker_id, request_id=request_id))

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Cancel those that have not ended. Their runners learn of it with their next heartbeat."""
        return await self._do(ask.Cancel(rollout_ids=list(rollout_ids)))

    async def update_rollout(
        self,
        rollout_id: str,
        *,
        input: Json | UnsetType = UNSET,
        mode: Mode | UnsetType | None = UNSET,
        resources_id: str | UnsetType | None = UNSET,
        config: RolloutConfig | UnsetType = UNSET,
        metadata: JsonObject | UnsetType = UNSET,
    ) -> Rollout:
        """Change what a rollout is given. What is left out stays; None is a value."""
        request = ask.UpdateRollout(
            rollout_id=rollout_id,
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=metadata,
        )
        return await self._do(request)

    async def wait(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[AttemptedRollout]:
        """Wait until all of these have ended, at most `timeout` seconds. Returns those that have."""
        if timeout is not None and math.isnan(timeout):
            raise StoreError("wait: timeout is nan: expected a number of seconds, or None")
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = ask.MAX_WAIT_S if until is None else max(0.0, until - time.monotonic())
            ended = await self._do(ask.Wait(rollout_ids=list(rollout_ids), wait_seconds=min(left, ask.MAX_WAIT_S)))
            if len(ended) == len(set(rollout_ids)) or (until is not None and time.monotonic() >= until):
                return ended

    async def publish_resources(
        self, resources: JsonObject, *, resources_id: str | None = None, request_id: str | None = None
    ) -> Resources:
        """Publish a version of resources, which becomes the latest of all."""
        request_id = request_id or new_request_id()
        return await self._do(
            ask.PublishResources(resources=resources, resources_id=resources_id, request_id=request_id)
        )

    # ------------------------------------------------------------ for runners

    async def claim(
        self, worker_id: str, *, limit: int = 1, wait_seconds: float = 0.0, request_id: str | None = None
    ) -> list[AttemptedRollout]:
        """Take rollouts from the queue's head, and start an attempt at each. Waits while the queue is empty."""
        request_id = request_id or new_request_id()
        return await self._do(
            ask.Claim(worker_id=worker_id, limit=limit, wait_seconds=wait_seconds, request_id=request_id)
        )

    async def heartbeat(
        self, worker_id: str, attempts: Sequence[AttemptRef] = (), stats: JsonObject | None = None
    ) -> list[Attempt]:
        """Say that these attempts are alive. The answer says what the store holds of them: one that is not preparing
        or running any more is not wanted."""
        return await self._do(ask.Heartbeat(worker_id=worker_id, attempts=list(attempts), stats=stats or {}))

    async def update_attempts(self, updates: Sequence[AttemptUpdate]) -> list[Attempt]:
        """Report how attempts ended. A late report changes nothing; the answer says what the store holds."""
        return await self._do(ask.UpdateAttempts(updates=list(updates)))

    async def report(
        self, rollout_id: str, attempt_id: str, status: Literal["succeeded", "failed"], result: Json = None
    ) -> Attempt:
        """Report how one attempt ended."""
        update = AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt_id, status=status, result=result)
        return (await self.update_attempts([update]))[0]

    async def add_spans(self, spans: Sequence[Span]) -> int:
        """Add spans; each is a sign of life of its attempt. Returns how many were new."""
        spans, added = list(spans), 0
        for first in range(0, max(len(spans), 1), ask.MAX_BATCH):
            added += await self._do(ask.AddSpans(spans=spans[first : first + ask.MAX_BATCH]))
        return added

    async def next_sequence_ids(self, rollout_id: str, count: int = 1) -> list[int]:
        """Reserve numbers for spans of a rollout."""
        return await self._do(ask.NextSequenceIds(rollout_id=rollout_id, count=count))

    # ------------------------------------------------------------ for readers

    async def get_rollout(self, rollout_id: str) -> AttemptedRollout:
        """Get one rollout. Raises UnknownIdError if there is none."""
        return (await self.query_rollouts(rollout_ids=[rollout_id])).items[0]

    async def query_rollouts(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        status_in: Sequence[RolloutStatus] | None = None,
        id_contains: str = "",
        descending: bool = False,
        limit: int = 100,
        offset: int = 0,
    ) -> Page[AttemptedRollout]:
        """Find rollouts, in the order in which they were enqueued, with their latest attempts. Raises UnknownIdError if
        one of `rollout_ids` does not exist."""
        request = ask.QueryRollouts(
            rollout_ids=None if rollout_ids is None else list(rollout_ids),
            status_in=None if status_in is None else list(status_in),
            id_contains=id_contains,
            descending=descending,
            limit=limit,
            offset=offset,
        )
        return await self._do(request)

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """List all attempts at a rollout, the first one first."""
        return await self._do(ask.QueryAttempts(rollout_id=rollout_id))

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        name_contains: str = "",
        trace_id: str | None = None,
        parent_id: str | None = None,
        limit: int = 1000,
        offset: int = 0,
    ) -> Page[Span]:
        """Find spans of a rollout, by sequence id: of one attempt, of the `latest`, or of all."""
        request = ask.QuerySpans(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            name=name,
            name_contains=name_contains,
            trace_id=trace_id,
            parent_id=parent_id,
            limit=limit,
            offset=offset,
        )
        return await self._do(request)

    async def latest_resources(self) -> Resources | None:
        """Get the resources that were published last."""
        page = await self._do(ask.QueryResources(limit=1))
        return page.items[0] if page.items else None

    async def query_resources(
        self, *, resources_id: str | None = None, version: int | None = None, limit: int = 100, offset: int = 0
    ) -> Page[Resources]:
        """Find versions of resources, newest first."""
        return await self._do(
            ask.QueryResources(resources_id=resources_id, version=version, limit=limit, offset=offset)
        )

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        id_contains: str = "",
        limit: int = 100,
        offset: int = 0,
    ) -> Page[Worker]:
        """Find workers, by id."""
        return await self._do(
            ask.QueryWorkers(
                status_in=None if status_in is None else list(status_in),
                id_contains=id_contains,
                limit=limit,
                offset=offset,
            )
        )

    async def statistics(self) -> Statistics:
        """Count what the store holds."""
        return await self._do(ask.GetStatistics())
