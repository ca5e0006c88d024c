"""Stores under the library's method names: in memory, served, and behind a URL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeVar, cast

from msgspec import UNSET
from msgspec.structs import replace

from ajet.schema.errors import UserError
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.span import Span
from ajet.store.client import StoreClient
from ajet.store.database_store import DatabaseStore, memory_store
from ajet.store.records import (
    Attempt,
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
from ajet.store.requests import AttemptUpdate, NewRollout, Role, StoreRequest, UnknownIdError
from ajet.store.rollout_store import RolloutStore
from ajet.store.server import StoreServer, issue

T = TypeVar("T")
NamedResources = Mapping[str, Any]
KEY_VARIABLE = "AJET_STORE_KEY"
PAGE = 1000
LATEST = "latest"


@dataclass(frozen=True)
class AttemptedRollout:
    """A rollout with its latest attempt; the rollout's fields are its own, too."""

    rollout: Rollout
    attempt: Attempt | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


ResourcesUpdate = Resources
"""One version of the resources, with `LLM`s and `PromptTemplate`s in it."""


class OtelResource(dict[str, Any]):
    """A span's resource."""

    @property
    def attributes(self) -> dict[str, Any]:
        return self


class _OpenedOnUse(RolloutStore):
    """A store in a database, which its first request opens."""

    def __init__(self, store: DatabaseStore) -> None:
        self._store, self._opened = store, False
        self._opening = asyncio.Lock()

    async def opened(self) -> DatabaseStore:
        if self._opened:
            self._store.keep_watch()
            return self._store
        async with self._opening:
            if not self._opened:
                await self._store.open()
                self._opened = True
        return self._store

    async def _do(self, request: StoreRequest[T]) -> T:
        return await (await self.opened())._do(request)

    async def aclose(self) -> None:
        await self._store.aclose()


class LightningStore:
    """A `RolloutStore` under the library's method names."""

    def __init__(self, store: RolloutStore) -> None:
        self.ours = _OpenedOnUse(store) if isinstance(store, DatabaseStore) else store

    async def close(self) -> None:
        await self.ours.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ rollouts

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Mode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        return await self.ours.enqueue_one(
            input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )

    async def enqueue_many_rollouts(self, rollouts: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        """Each with the arguments of `enqueue_rollout`."""
        new = [NewRollout(**{"input": None, **{k: v for k, v in one.items() if v is not None}}) for one in rollouts]
        return await self.ours.enqueue(new)

    async def start_rollout(
        self,
        input: Any,
        mode: Mode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        new = NewRollout(
            input=input, mode=mode, resources_id=resources_id, config=config or RolloutConfig(), metadata=metadata or {}
        )
        return _attempted(await self.ours.start_rollout(new, worker_id=worker_id))

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        return _attempted(await self.ours.start_attempt(rollout_id, worker_id=worker_id))

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, wait_seconds: float = 0.0
    ) -> list[AttemptedRollout]:
        claimed = await self.ours.claim(worker_id or "worker", limit=limit, wait_seconds=wait_seconds)
        return [_attempted(one) for one in claimed]

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[AttemptedRollout]:
        """Return those that have ended by then."""
        return [_attempted(one) for one in await self.ours.wait(rollout_ids, timeout)]

    async def update_rollout(self, rollout_id: str, *, status: str | None = None, **changes: Any) -> Rollout:
        if status is not None and status != RolloutStatus.CANCELLED:
            raise UserError(
                f"update_rollout(status={status!r}): a status follows from attempts; only `cancelled` is set"
            )
        changed = await self.ours.update_rollout(rollout_id, **changes)
        return (await self.ours.cancel([rollout_id]))[0] if status is not None else changed

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[str] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
    ) -> list[AttemptedRollout]:
        statuses = None if status_in is None else [RolloutStatus(one) for one in status_in]
        found = await _all_pages(
            self.ours.query_rollouts,
            rollout_ids=rollout_id_in,
            status_in=statuses,
            id_contains=rollout_id_contains or "",
        )
        return [_attempted(one) for one in found]

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | None:
        try:
            return _attempted(await self.ours.get_rollout(rollout_id))
        except UnknownIdError:
            return None

    # ------------------------------------------------------------ attempts

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: Literal["succeeded", "failed"] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Attempt:
        if attempt_id == LATEST:
            latest = await self.get_latest_attempt(rollout_id)
            if latest is None:
                raise UnknownIdError(f"rollout {rollout_id} has no attempt yet")
            attempt_id = latest.attempt_id
        update = AttemptUpdate(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            status=UNSET if status is None else status,
            metadata=UNSET if metadata is None else metadata,
        )
        return (await self.ours.update_attempts([update]))[0]

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self.ours.query_attempts(rollout_id)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        attempts = await self.query_attempts(rollout_id)
        return attempts[-1] if attempts else None

    # ------------------------------------------------------------ spans

    async def add_span(self, span: Span) -> Span | None:
        """Returns None if there is a span with this id already."""
        return span if await self.ours.add_spans([span]) else None

    async def add_many_spans(self, spans: Sequence[Span]) -> int:
        return await self.ours.add_spans(spans)

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        name_contains: str | None = None,
        trace_id: str | None = None,
        parent_id: str | None = None,
    ) -> list[Span]:
        found = await _all_pages(
            self.ours.query_spans,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            name=name,
            name_contains=name_contains or "",
            trace_id=trace_id,
            parent_id=parent_id,
        )
        return [replace(span, resource=OtelResource(span.resource)) for span in found]

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return (await self.ours.next_sequence_ids(rollout_id))[0]

    async def get_many_span_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> list[int]:
        """Return one for each rollout and attempt."""
        return [await self.get_next_span_sequence_id(*one) for one in attempts]

    # ------------------------------------------------------------ resources, workers

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return _update(await self.ours.publish_resources(_plain(resources)))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return _update(await self.ours.publish_resources(_plain(resources), resources_id=resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        latest = await self.ours.latest_resources()
        return None if latest is None else _update(latest)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        page = await self.ours.query_resources(resources_id=resources_id, limit=1)
        return _update(page.items[0]) if page.items else None

    async def query_resources(self, *, resources_id: str | None = None) -> list[ResourcesUpdate]:
        """All versions, the newest first."""
        return [_update(one) for one in await _all_pages(self.ours.query_resources, resources_id=resources_id)]

    async def query_workers(
        self, *, status_in: Sequence[str] | None = None, worker_id_contains: str | None = None
    ) -> list[Worker]:
        statuses = None if status_in is None else [WorkerStatus(one) for one in status_in]
        return await _all_pages(self.ours.query_workers, status_in=statuses, id_contains=worker_id_contains or "")

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        found = await self.query_workers(worker_id_contains=worker_id)
        return next((one for one in found if one.worker_id == worker_id), None)

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | None = None) -> None:
        await self.ours.heartbeat(worker_id, stats=heartbeat_stats)

    async def statistics(self) -> Statistics:
        return await self.ours.statistics()


class InMemoryLightningStore(LightningStore):
    """A store in this process's memory."""

    def __init__(self) -> None:
        super().__init__(memory_store())


LightningStoreThreaded = LightningStore
"""Every store of ours may be used from several tasks at a time; for threads there is `BlockingStore`."""


class LightningStoreServer(LightningStore):
    """Serves a store. `key` opens it for everything, and has to reach its clients."""

    def __init__(self, store: LightningStore, host: str | None = None, port: int = 4747) -> None:
        super().__init__(store.ours)
        self._host, self._port = host or "127.0.0.1", port
        self._server: StoreServer | None = None
        self.key = ""

    async def start(self) -> None:
        store = await cast(_OpenedOnUse, self.ours).opened()
        if not self.key:  # the one from before `stop` is still valid
            self.key = await store.tables(lambda tables: issue(tables, "agentlightning", list(Role)))
        self._server = StoreServer(store)
        await self._server.start(self._host, self._port, "host or port")

    async def run_forever(self) -> None:
        await self.start()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.aclose()
            self._server = None

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._port}" if self._server is None else self._server.url


class LightningStoreClient(LightningStore):
    """A store behind a URL. Its key: `api_key`, or the variable AJET_STORE_KEY."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        super().__init__(StoreClient(address, api_key or os.environ.get(KEY_VARIABLE, "")))


async def _all_pages(query: Callable[..., Awaitable[Page[T]]], **given: Any) -> list[T]:
    """Everything that a query finds. The library's queries have no pages."""
    found: list[T] = []
    while True:
        page = await query(**given, limit=PAGE, offset=len(found))
        found += page.items
        if not page.items or len(found) >= page.total:
            return found


# ---------------------------------------------------------------- resources as JSON


RESOURCES: dict[Any, Any] = {"llm": LLM, "prompt_template": PromptTemplate}
"""The class of each `resource_type`."""


def _plain(resources: NamedResources) -> dict[str, Any]:
    return {name: _as_json(name, value) for name, value in resources.items()}


def _as_json(name: str, resource: Any) -> dict[str, Any]:
    for kind, made_of in RESOURCES.items():
        if isinstance(resource, made_of):
            given = {each.name: getattr(resource, each.name) for each in fields(made_of)}  # a subclass may have more
            plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
            return {"resource_type": kind, **plain}
    raise UserError(f"resource {name!r} is a {type(resource).__name__}: resources are LLM and PromptTemplate")


def _update(found: Resources) -> ResourcesUpdate:
    return replace(found, resources={name: _as_object(value) for name, value in found.resources.items()})


def _as_object(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("resource_type") not in RESOURCES:
        return value
    return RESOURCES[value["resource_type"]](**{name: item for name, item in value.items() if name != "resource_type"})


def _attempted(found: Any) -> AttemptedRollout:
    return AttemptedRollout(found.rollout, found.attempt)
