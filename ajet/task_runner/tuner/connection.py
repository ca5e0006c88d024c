"""`Connection`: how one agent reaches its model: by function calls in this process, or over HTTP from another one.

OpenAI's and Anthropic's Python clients are built on `httpx` or, in newer versions, on its successor `httpx2`; the
transports are made for the one that the client at hand uses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from ajet.gateway.gateway import answer
from ajet.gateway.protocol import Caller
from ajet.observe.tracing import OUTSIDE, current_place
from ajet.schema.errors import RewardError
from ajet.system.http_client import HttpClient
from ajet.system.http_messages import Answer

log = logging.getLogger(__name__)
T = TypeVar("T")

_END = object()


class Asked(Protocol):
    """What answers the requests of an event loop."""

    async def ask(self, method: str, path: str, body: bytes) -> Answer: ...


class LoopBridge:
    """Connects one agent to its episode's session."""

    def __init__(self, caller: Caller, loop: asyncio.AbstractEventLoop, process: int | None = None) -> None:
        """`process`: that of the loop; None: this one."""
        self.caller = caller
        self._loop = loop
        self._process = process or os.getpid()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the service loop. In a forked process there is none to answer."""
        if os.getpid() != self._process:
            call.close()
            raise RuntimeError(
                "a process that a workflow forked can't use its tuner, nor clients of that: make one there, with the "
                "base_url, api_key and model that tuner.as_oai_baseurl_apikey() gave the workflow"
            )
        place = current_place()
        asker = None if place is None or place.recording is None else place.recording.attempt_id
        if asker not in (None, OUTSIDE) and asker != self.caller.session.episode_id:
            _warn_shared()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def call(self, function: Callable[[], T]) -> T:
        """Call a short function on the service loop and wait for its result."""
        if _running_loop() is self._loop:
            return function()
        return self.submit(_call(function)).result()

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Ask from an event loop. If the answer is a stream, read it in the same loop."""
        reply = await asyncio.wrap_future(self.submit(answer(method, path, body, self.caller)))
        if isinstance(reply.body, bytes):
            return reply
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        close = self._pump(reply, lambda item: loop.call_soon_threadsafe(arrived.put_nowait, item))
        return Answer(reply.status, _read(arrived), reply.headers, close)

    def ask_blocking(
        self, method: str, path: str, body: bytes, timeout: float | None
    ) -> tuple[Answer, Iterator[bytes]]:
        """Ask from a plain thread; the iterator yields the answer's body. Raises TimeoutError."""
        if _running_loop() is self._loop:
            raise RuntimeError("a blocking client can't be used on the service loop: it would wait for itself")
        asked = self.submit(answer(method, path, body, self.caller))
        try:
            reply = asked.result(timeout)
        except BaseException:
            asked.cancel()
            raise
        if isinstance(reply.body, bytes):
            return reply, iter([reply.body])
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        close = self._pump(reply, arrived.put)
        return Answer(reply.status, reply.body, reply.headers, close), _taken(arrived)

    def _pump(self, reply: Answer, put: Callable[[object], object]) -> Callable[[], None]:
        """Start handing over a stream's chunks; return a function that stops it."""
        pump = self.submit(_hand_over(reply, put))

        def stop() -> None:
            pump.cancel()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(reply.close)

        return stop


_shared_is_named = threading.Lock()
"""Taken by the one thread that names it, and kept."""


def _warn_shared() -> None:
    if _shared_is_named.acquire(blocking=False):
        log.warning(
            "an episode uses a client or tuner of another episode, which gets its calls and trains them with its own "
            "reward: make clients in `execute`, and keep none in a global variable (said once)"
        )


class AnsweredBridge:
    """A bridge whose first request has already been made: asking it returns that answer."""

    def __init__(self, bridge: Asked, first: Answer) -> None:
        self._bridge = bridge
        self._first: Answer | None = first

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        first, self._first = self._first, None
        return first if first is not None else await self._bridge.ask(method, path, body)


async def _call(function: Callable[[], T]) -> T:
    return function()


async def _hand_over(reply: Answer, put: Callable[[object], object]) -> None:
    """Runs on the service loop, until the stream ends or its reader's loop is closed. An error goes to the reader, who
    would wait for ever."""
    assert not isinstance(reply.body, bytes)
    try:
        try:
            async for chunk in reply.body:
                put(chunk)
            put(_END)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            put(error)
    except RuntimeError as error:
        if "loop is closed" not in str(error):
            raise
    finally:
        reply.close()


async def _read(arrived: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
    while (item := await arrived.get()) is not _END:
        yield _chunk(item)


def _taken(arrived: queue.SimpleQueue[Any]) -> Iterator[bytes]:
    while (item := arrived.get()) is not _END:
        yield _chunk(item)


def _chunk(item: Any) -> bytes:
    if isinstance(item, Exception):
        raise item
    chunk: bytes = item
    return chunk


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


MOST_HEAD_BYTES = 64 * 1024

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpBridge:
    """Connects one agent to its episode's session at the gateway."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """`base_url`: one that `can_reach`."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname, parts.port
        self._head = f"host: {parts.netloc}\r\nauthorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Connection]] = WeakKeyDictionary()

    @staticmethod
    def can_reach(base_url: str) -> bool:
        """Whether it is plain HTTP on this machine, by an address that no resolver has to be asked for."""
        parts = urlsplit(base_url)
        try:
            here = ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return False
        return here and parts.scheme == "http" and parts.path == "/v1"

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Raises OSError if there is no answer, or none that our gateway would give."""
        request = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            answer = await self._exchange(idle.pop(), request, idle, reused=True)
            if answer is not None:
                return answer
        connection = await asyncio.open_connection(self._host, self._port, limit=MOST_HEAD_BYTES)
        answer = await self._exchange(connection, request, idle, reused=False)
        assert answer is not None
        return answer

    async def _exchange(
        self, connection: _Connection, request: bytes, idle: list[_Connection], *, reused: bool
    ) -> Answer | None:
        """Send a request and read its answer. None: a reused connection had been closed while it was idle."""
        reader, writer = connection
        keep = begun = False
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            begun = True
            status, headers = _read_head(head)
            body = await reader.readexactly(int(headers["content-length"]))
            keep = headers.get("connection", "").lower() != "close"
            return Answer(status, body, headers)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if reused and not begun and not getattr(error, "partial", b""):
                return None
            raise ConnectionError("the gateway closed the connection before its answer was complete") from error
        except (asyncio.LimitOverrunError, LookupError, ValueError) as error:
            raise ConnectionError(f"the gateway's answer is not readable: {error}") from error
        finally:
            if keep:
                idle.append(connection)
            else:
                writer.close()


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers, by their lower-case names."""
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


IN_PROCESS_URL = "http://ajet.in-process/v1"
IN_PROCESS_KEY = "sk-ajet-in-process"
REWARD_TIMEOUT_S = 30.0
"""Recording a reward takes no time: a gateway that needs longer is gone."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What a client is built with. Without `bridge`, clients use plain HTTP."""

    base_url: str
    api_key: str
    model: str
    bridge: LoopBridge | None = None
    proxied: bool = True
    """A transport over HTTP, through the proxy that the environment may name."""

    @classmethod
    def in_process(cls, bridge: LoopBridge, model: str) -> Connection:
        return cls(IN_PROCESS_URL, IN_PROCESS_KEY, model, bridge)

    def async_client(self, client_class: Any) -> Any:
        """An SDK's own asynchronous HTTP client, for any event loop."""
        if self.bridge is not None:
            return client_over(self.bridge, client_class)
        library = _http_library(client_class)
        _, _, over_http = _transports(library)
        options = {"trust_env": self.proxied, "verify": _tls_context(library, self.proxied), "timeout": None}
        return client_class(transport=over_http(lambda: client_class(**options)), timeout=None)

    def blocking_client(self, client_class: Any) -> Any:
        """An SDK's own blocking HTTP client."""
        library = _http_library(client_class)
        if self.bridge is None:
            return client_class(trust_env=self.proxied, verify=_tls_context(library, self.proxied), timeout=None)
        _, transport, _ = _transports(library)
        return client_class(transport=transport(self.bridge), timeout=None)


def client_over(bridge: Asked, client_class: Any) -> Any:
    """An SDK's own asynchronous HTTP client, whose requests a bridge answers."""
    over_bridge, _, _ = _transports(_http_library(client_class))
    return client_class(transport=over_bridge(bridge), timeout=None)


def post_reward(base_url: str, api_key: str, reward: dict[str, Any]) -> None:
    """`POST /v1/rewards`. Raises RewardError with the gateway's message."""
    gateway = HttpClient(base_url, {"authorization": f"Bearer {api_key}"})
    answer = gateway.request("POST", "/rewards", json.dumps(reward).encode(), REWARD_TIMEOUT_S)
    if answer.status >= 300:
        said = answer.body[:2000].decode(errors="replace")
        raise RewardError(f"the gateway refused the reward: {answer.status} {said}")


def _http_library(client_class: type) -> ModuleType:
    """The library that `client_class` (an SDK's default HTTP client) is derived from."""
    for base in client_class.__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("httpx", "httpx2"):
            return sys.modules[name]
    raise TypeError(f"{client_class} is not an httpx client")


@lru_cache
def _tls_context(httpx: Any, trust_env: bool) -> Any:
    """What the library's clients make for themselves. That takes longer than a short reply, so it is done once."""
    return httpx.create_ssl_context(trust_env=trust_env)


@lru_cache
def _transports(httpx: Any) -> tuple[type, type, type]:
    """For this HTTP library: the asynchronous and the blocking transport over a bridge, and the asynchronous one over
    HTTP."""

    class AsyncBody(httpx.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None]) -> None:
            self._chunks = chunks
            self._close = close

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._chunks

        async def aclose(self) -> None:
            self._close()

    class Body(httpx.SyncByteStream):  # type: ignore[misc]
        def __init__(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
            self._chunks = chunks
            self.close = close

        def __iter__(self) -> Iterator[bytes]:
            return self._chunks

    def response(answer: Answer, body: Any, request: Any) -> Any:
        if isinstance(answer.body, bytes):
            return httpx.Response(answer.status, headers=answer.headers, content=answer.body, request=request)
        return httpx.Response(answer.status, headers=answer.headers, stream=body, request=request)

    class AsyncTransport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self, bridge: Asked) -> None:
            self._bridge = bridge

        async def handle_async_request(self, request: Any) -> Any:
            content = await request.aread()
            try:
                async with asyncio.timeout(_read_timeout(request)):
                    answer = await self._bridge.ask(request.method, request.url.path, content)
            except TimeoutError:
                raise httpx.ReadTimeout("no answer within the client's timeout", request=request) from None
            return response(
                answer, None if isinstance(answer.body, bytes) else AsyncBody(answer.body, answer.close), request
            )

    class Transport(httpx.BaseTransport):  # type: ignore[misc]
        def __init__(self, bridge: LoopBridge) -> None:
            self._bridge = bridge

        def handle_request(self, request: Any) -> Any:
            body = request.read()
            try:
                answer, chunks = self._bridge.ask_blocking(
                    request.method, request.url.path, body, _read_timeout(request)
                )
            except TimeoutError:
                raise httpx.ReadTimeout("no answer within the client's timeout", request=request) from None
            return response(answer, Body(chunks, answer.close), request)

    class EveryLoop(httpx.AsyncBaseTransport):  # type: ignore[misc]
        """A connection belongs to the event loop that opened it, and plain code may run one loop after another."""

        def __init__(self, new_client: Callable[[], Any]) -> None:
            self._new_client = new_client
            self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

        async def handle_async_request(self, request: Any) -> Any:
            loop = asyncio.get_running_loop()
            if loop not in self._clients:
                for closed in [one for one in list(self._clients) if one.is_closed()]:  # other threads add theirs
                    self._clients.pop(closed, None)
                self._clients[loop] = self._new_client()
            return await self._clients[loop].send(request, stream=True)

        async def aclose(self) -> None:
            """Connections of other loops end with their loop."""
            client = self._clients.pop(asyncio.get_running_loop(), None)
            if client is not None:
                await client.aclose()

    return AsyncTransport, Transport, EveryLoop


def _read_timeout(request: Any) -> float | None:
    return cast("float | None", request.extensions.get("timeout", {}).get("read"))
