"""`StoreClient`: a client of the store at a URL. It retries requests whose answer was lost, up to a time limit.

All requests are idempotent, so a restart of the server or a network failure only costs time. Small requests that are
made while others are under way go together, in one. `BlockingStore` has the same methods for code without an event
loop:

    with BlockingStore.connect(url, key) as store:
        rollout = store.enqueue_one({"question": "2 + 2?"})
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from ajet.store import requests as ask
from ajet.store.records import ProtocolInfo
from ajet.store.requests import (
    BATCH_PATH,
    OPERATION_OF,
    PATH_PREFIX,
    PROTOCOL,
    PROTOCOL_HEADER,
    SMALL,
    BatchItem,
    BatchOutcome,
    ErrorAnswer,
    KeyRefusedError,
    ProtocolMismatchError,
    StoreError,
    StoreRequest,
    StoreUnavailableError,
    as_json,
    error_of,
)
from ajet.store.rollout_store import RolloutStore
from ajet.system.http_client import AnswerTooLargeError, BoundedClient
from ajet.system.http_messages import PREFIX

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a request is retried while the store is unreachable: longer than a server takes to restart."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
HURRY_S = 5.0
"""The same for a client that is `in_a_hurry`."""
REQUEST_S = 30.0
"""The timeout of one answer, in addition to the time that the request itself asks to wait."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
RETRIED = frozenset({429, 502, 503, 504})

_DECODERS: dict[type[StoreRequest[Any]], Any] = {
    request: msgspec.json.Decoder(operation.answer).decode for request, operation in OPERATION_OF.items()
}
_decode_error = msgspec.json.Decoder(ErrorAnswer).decode
_decode_outcomes = msgspec.json.Decoder(list[BatchOutcome]).decode
MAX_TOGETHER, MAX_TOGETHER_BYTES = 500, 8 * 1024 * 1024
"""The limits of requests that go in one. A request that is larger goes alone."""


class _SmallRequest(NamedTuple):
    """A small request, and where its answer goes."""

    path: str
    body: bytes
    answer: asyncio.Future[bytes]


class StoreClient(RolloutStore):
    """Use it as `async with StoreClient(url, key) as store: …`, on one event loop."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        ca: str | Path | None = None,
        patience_seconds: float = PATIENCE_S,
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ca`: a PEM file with the authority that signed the server's certificate, if it is not a public one.
        `in_a_hurry`: whether the program is about to end, so that requests are retried only briefly."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StoreError(f"{url!r} is not the URL of a store: it looks like http://host:port")
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise KeyRefusedError(f"no key for {url}: a store's keys begin with {PREFIX} (see `ajet store keys`)")
        self.url = url.rstrip("/")
        self._patience_s = patience_seconds
        self._in_a_hurry = in_a_hurry
        self._waiting: deque[_SmallRequest] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._http = BoundedClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}", PROTOCOL_HEADER: str(PROTOCOL)},
            verify=_verify(ca) if parts.scheme == "https" else True,
            timeout=REQUEST_S,
            max_answer_bytes=MAX_ANSWER_BYTES,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def aclose(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
            _refuse(self._waiting, _closed())  # a task that has not begun refuses nothing
        await self._http.aclose()

    async def info(self) -> ProtocolInfo:
        """Information on the server and the rights of this key. Raises a StoreError, so call it first to check the
        connection."""
        reply = await self._patiently("GET", "/v1/store", b"", REQUEST_S)
        return msgspec.json.decode(reply, type=ProtocolInfo)

    async def extension(self, name: str, asked: dict[str, Any]) -> Any:
        """Call an extension of the server (see `StoreServer`). The call must be idempotent."""
        return msgspec.json.decode(
            await self._patiently("POST", f"/v1/runner/{name}", msgspec.json.encode(asked), REQUEST_S)
        )

    async def _do(self, request: StoreRequest[T]) -> T:
        wait = request.wait_seconds if isinstance(request, ask.Claim | ask.Wait) else 0.0
        path, body = OPERATION_OF[type(request)].path, as_json(request)
        if type(request) in SMALL:
            reply = await self._together(path, body)
        else:
            reply = await self._patiently("POST", PATH_PREFIX + path, body, wait + REQUEST_S)
        answer: T = _DECODERS[type(request)](reply)
        return answer

    async def _together(self, path: str, body: bytes) -> bytes:
        """Send this with what else waits, as soon as nothing is under way."""
        waiting = _SmallRequest(path, body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_waiting())
        return await waiting.answer

    async def _send_waiting(self) -> None:
        group: list[_SmallRequest] = []
        try:
            while group := self._next_group():
                try:
                    await self._send(group)
                except StoreError as error:
                    _refuse(group, error)
        finally:
            _refuse([*group, *self._waiting], _closed())

    def _next_group(self) -> list[_SmallRequest]:
        """What goes in the next request. Without those whose callers were cancelled."""
        group: list[_SmallRequest] = []
        size = 0
        while self._waiting and len(group) < MAX_TOGETHER:
            first = self._waiting[0]
            size += len(first.body)
            if group and size > MAX_TOGETHER_BYTES:
                break
            self._waiting.popleft()
            if not first.answer.done():
                group.append(first)
        return group

    async def _send(self, group: list[_SmallRequest]) -> None:
        """Send these, and hand out their answers. Raises a StoreError if none of them got one."""
        if len(group) == 1:
            (alone,) = group
            reply = await self._patiently("POST", PATH_PREFIX + alone.path, alone.body, REQUEST_S)
            outcomes = [BatchOutcome(msgspec.Raw(reply))]
        else:
            items = [BatchItem(one.path, msgspec.Raw(one.body)) for one in group]
            reply = await self._patiently("POST", BATCH_PATH, msgspec.json.encode(items), REQUEST_S)
            try:
                outcomes = _decode_outcomes(reply)
            except msgspec.MsgspecError as error:
                raise StoreError(f"{self.url}: no store answers like this: {error}") from error
            if len(outcomes) != len(group):
                raise StoreError(f"{self.url}: {len(outcomes)} outcomes of {len(group)} requests")
        for one, outcome in zip(group, outcomes, strict=True):
            if outcome.error is not None:
                _refuse([one], error_of(outcome.error.code, outcome.error.message))
            elif not one.answer.done():
                one.answer.set_result(bytes(outcome.answer))

    async def _patiently(self, method: str, path: str, body: bytes, timeout: float) -> bytes:
        until = time.monotonic() + self._patience_s
        pause, hurried = FIRST_PAUSE_S, False
        while True:
            try:
                return await self._once(method, path, body, timeout)
            except StoreUnavailableError:
                if not hurried and (hurried := self._in_a_hurry()):
                    until = min(until, time.monotonic() + HURRY_S)
                if time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _once(self, method: str, path: str, body: bytes, timeout: float) -> bytes:
        try:
            reply = await self._http.request(method, path, content=body, timeout=timeout)
        except AnswerTooLargeError as error:
            raise StoreError(f"{error}: ask for less at a time") from error
        except httpx.TransportError as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(error):
                raise StoreError(f"{self.url}: its certificate can't be trusted: {error} (see --ca)") from error
            raise StoreUnavailableError(f"{self.url} can't be reached: {str(error) or type(error).__name__}") from error
        spoken = reply.headers.get(PROTOCOL_HEADER)
        if reply.status_code == 200 and spoken == str(PROTOCOL):
            return reply.content
        if reply.status_code in RETRIED:
            raise StoreUnavailableError(f"{self.url}: {reply.status_code} {reply.text[:200]}")
        if spoken is None:
            raise StoreError(f"{self.url} is not a store: it answered {reply.status_code} {reply.text[:200]!r}")
        try:
            detail = _decode_error(reply.content).error
        except msgspec.MsgspecError:
            raise ProtocolMismatchError(
                f"{self.url} speaks protocol {spoken[:20]}, this client {PROTOCOL}: install the same version of ajet"
            ) from None
        raise error_of(detail.code, detail.message)


def _refuse(group: Iterable[_SmallRequest], error: StoreError) -> None:
    for one in group:
        if not one.answer.done():
            one.answer.set_exception(error)


def _closed() -> StoreError:
    return StoreUnavailableError("the store's client was closed")


def _verify(ca: str | Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"{ca}: not a certificate authority in PEM form: {error}") from error


P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[RolloutStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingStore, P], T]:
    def call(self: BlockingStore, /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._store, *args, **options))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class BlockingStore:
    """A store for blocking code; any thread may call it. The client runs on an event loop in a separate thread."""

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
