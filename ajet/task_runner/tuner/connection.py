"""`Connection`: how one agent reaches its model. Within the process that runs the episode, by function calls dressed as
an HTTP transport, so that the official clients work without a socket; from any other process, over HTTP.

OpenAI's and Anthropic's Python clients are built on `httpx` or, in newer versions, on its successor `httpx2`; the
transports are made for the one that the client at hand uses.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ajet.schema.errors import RewardError
from ajet.system.http_messages import Answer
from ajet.task_runner.tuner.bridge import Asked, LoopBridge

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
    """By HTTP, through the proxy that the environment may name."""

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
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    request = Request(f"{base_url.rstrip('/')}/rewards", json.dumps(reward).encode(), headers, method="POST")
    opener = build_opener(ProxyHandler({}))  # the gateway is nearby: a proxy set in the environment can't reach it
    try:
        opener.open(request, timeout=REWARD_TIMEOUT_S).close()
    except HTTPError as error:
        raise RewardError(
            f"the gateway refused the reward: {error.code} {error.read(2000).decode(errors='replace')}"
        ) from None


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
                for closed in [one for one in self._clients if one.is_closed()]:
                    del self._clients[closed]
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
