"""`BlockingStore`: the methods of `RolloutStore` for code without an event loop.

with BlockingStore.connect(url, key) as store:
    rollout = store.enqueue_one({"question": "2 + 2?"})
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ajet.store.client import PATIENCE_S, StoreClient
from ajet.store.rollout_store import RolloutStore

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[RolloutStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingStore, P], T]:
    def call(self: BlockingStore, /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._store, *args, **options))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class BlockingStore:
    """Any thread may call it. The store lives on an event loop in a thread of its own."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, RolloutStore]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ajet-store-client", daemon=True)
        self._thread.start()
        try:
            self._store = self._run(make())
        except BaseException:
            self._stop()
            raise

    @classmethod
    def connect(
        cls, url: str, key: str, *, ca: str | Path | None = None, patience_seconds: float = PATIENCE_S
    ) -> BlockingStore:
        """The store behind a URL."""

        async def make() -> RolloutStore:
            return StoreClient(url, key, ca=ca, patience_seconds=patience_seconds)

        return cls(make)

    def close(self) -> None:
        self._run(self._store.aclose())
        self._stop()

    def __enter__(self) -> BlockingStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    enqueue = _blocking(RolloutStore.enqueue)
    enqueue_one = _blocking(RolloutStore.enqueue_one)
    start_rollout = _blocking(RolloutStore.start_rollout)
    start_attempt = _blocking(RolloutStore.start_attempt)
    cancel = _blocking(RolloutStore.cancel)
    update_rollout = _blocking(RolloutStore.update_rollout)
    wait = _blocking(RolloutStore.wait)
    publish_resources = _blocking(RolloutStore.publish_resources)
    claim = _blocking(RolloutStore.claim)
    heartbeat = _blocking(RolloutStore.heartbeat)
    update_attempts = _blocking(RolloutStore.update_attempts)
    report = _blocking(RolloutStore.report)
    add_spans = _blocking(RolloutStore.add_spans)
    next_sequence_ids = _blocking(RolloutStore.next_sequence_ids)
    get_rollout = _blocking(RolloutStore.get_rollout)
    query_rollouts = _blocking(RolloutStore.query_rollouts)
    query_attempts = _blocking(RolloutStore.query_attempts)
    query_spans = _blocking(RolloutStore.query_spans)
    latest_resources = _blocking(RolloutStore.latest_resources)
    query_resources = _blocking(RolloutStore.query_resources)
    query_workers = _blocking(RolloutStore.query_workers)
    statistics = _blocking(RolloutStore.statistics)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
