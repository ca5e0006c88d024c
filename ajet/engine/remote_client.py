"""HTTP to one or several equivalent endpoints: which ones, retries with growing pauses, typed errors.

A request that fails for a transient reason (no connection, 408, 429, 5xx) is retried, at another endpoint if there is
one. A key that is refused isn't used again. Errors in the request itself are raised at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ajet.schema.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EngineOverloadedError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelCallError,
)
from ajet.system.http_client import AnswerTooLargeError, BoundedClient

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may well succeed."""
REFUSED_KEY = frozenset({401, 403})
MAX_PAUSE_S = 30.0
IDLE_S = 2.0
"""How long an idle connection is used again. Servers close theirs after 5 s (uvicorn, and so vLLM's), and a request
sent at that moment would be lost."""
CONTEXT_WORDS = ("context_length_exceeded", "maximum context length", "max_model_len", "longer than the maximum")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address with one key."""

    base_url: str
    """Up to and including `/v1`."""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How to reach a remote model."""

    endpoints: tuple[Endpoint, ...]
    model: str
    """The server's name for it."""
    max_model_len: int = 18000
    max_parallel: int = 32
    """Requests in flight at a time, over all endpoints."""
    requests_per_minute: float | None = None
    """Requests started per minute and endpoint."""
    max_attempts: int = 6
    """How often a request is tried before it fails."""
    timeout_s: float = 600.0
    """Seconds per attempt, for requests without a deadline of their own."""
    first_pause_s: float = 0.5
    """Pause before the second attempt; it doubles with each further one."""
    if_silent: str = ""
    """What happens to requests whose server sends nothing. Default: an attempt ends after `timeout_s`."""

    @classmethod
    def from_config(cls, config: Any) -> RemoteSettings:
        """Read `ajet.rollout.remote`; without a model there, the name is `model.path`."""
        remote = config.ajet.rollout.remote
        return cls(
            endpoints=pair_endpoints(remote.base_url, remote.api_key),
            model=remote.model or config.ajet.model.path,
            max_model_len=config.ajet.rollout.max_model_len,
            max_parallel=remote.max_parallel,
            requests_per_minute=remote.requests_per_minute,
            max_attempts=remote.max_attempts,
            timeout_s=remote.timeout,
        )


def pair_endpoints(base_url: str | list[str] | None, api_key: str | list[str] | None) -> tuple[Endpoint, ...]:
    """Pair addresses with keys in order; a single address goes with every key, a single key with every address."""
    given = [base_url] if isinstance(base_url, str) else list(base_url or [])
    urls = given or [url for url in [os.environ.get("OPENAI_BASE_URL", "")] if url]
    keys = [api_key] if isinstance(api_key, str) else list(api_key or [])
    keys = keys or [os.environ.get("OPENAI_API_KEY", "")]
    if not urls:
        raise ConfigError("rollout.engine: remote needs rollout.remote.base_url (or OPENAI_BASE_URL)")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.remote.base_url {url!r} must start with http:// or https://")
    if len(urls) > 1 and len(keys) > 1 and len(urls) != len(keys):
        raise ConfigError(
            f"rollout.remote has {len(urls)} base_url and {len(keys)} api_key, which can't be paired: give one of "
            "either, or as many of both"
        )
    count = max(len(urls), len(keys))
    urls = urls * count if len(urls) == 1 else urls
    keys = keys * count if len(keys) == 1 else keys
    return tuple(Endpoint(url.rstrip("/"), key) for url, key in zip(urls, keys, strict=True))


@dataclass(slots=True)
class _EndpointState:
    """An endpoint and what is known about it."""

    endpoint: Endpoint
    free_at: float = 0.0
    """Monotonic time from which it may be asked again."""
    refused: str = ""
    """Why its key is no longer used."""
    in_flight: int = 0


class TransientError(Exception):
    """An attempt failed for a reason that may pass."""

    def __init__(self, error: ModelCallError, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


class RemoteClient:
    """Sends JSON, gets JSON. Each event loop needs its own."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._endpoints = [_EndpointState(endpoint) for endpoint in settings.endpoints]
        connections = settings.max_parallel
        self._http = BoundedClient(
            if_silent=settings.if_silent or f"each attempt ends after {settings.timeout_s:g} s",
            timeout=httpx.Timeout(settings.timeout_s, connect=10.0),
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
            ),
        )
        self._slots = asyncio.Semaphore(settings.max_parallel)
        self._jitter = random.Random()

    async def post(self, path: str, body: Mapping[str, Any], *, sticky: str = "") -> dict[str, Any]:
        """Send a request; returns its JSON answer. Requests with the same `sticky` text go to the same endpoint."""

        async def read(response: httpx.Response) -> dict[str, Any]:
            await response.aread()
            try:
                answer = response.json()
            except ValueError as error:  # its encoding, too
                raise TransientError(EngineError(f"the server's answer isn't JSON: {response.text[:200]!r}")) from error
            if not isinstance(answer, dict):
                raise EngineError(f"the server's answer isn't a JSON object: {response.text[:200]!r}")
            return answer

        answer: dict[str, Any] = await self._with_retries(path, body, read, sticky)
        return answer

    async def stream(
        self, path: str, body: Mapping[str, Any], on_event: Callable[[dict[str, Any]], None], *, sticky: str = ""
    ) -> None:
        """Send a request whose answer is a stream of events. It is retried only until the first event arrives."""

        async def read(response: httpx.Response) -> None:
            begun = False
            try:
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                        begun = True
                        on_event(json.loads(data))
            except json.JSONDecodeError as error:
                raise EngineError(f"the server's stream broke off: {error}") from error
            except httpx.HTTPError as error:
                if begun:
                    raise EngineError(f"the server's stream broke off: {error!r}") from error
                raise

        await self._with_retries(path, {**body, "stream": True}, read, sticky)

    async def control(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a command to every server; `path` starts at the server's root, not at `/v1`."""
        self._check_open()
        await asyncio.gather(*(self._control(state.endpoint, path, body) for state in self._endpoints))

    async def _control(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> None:
        root = endpoint.base_url.removesuffix("/v1")
        try:
            response = await self._http.post(root + path, json=dict(body), headers=_authorization(endpoint))
        except (httpx.HTTPError, AnswerTooLargeError) as error:
            raise EngineError(f"{root}{path} failed: {error!r}") from error
        if response.status_code >= 400:
            raise EngineError(f"{root}{path} answered {response.status_code}: {_message(response.text)}")

    async def aclose(self) -> None:
        """What is asked for afterwards raises an EngineError."""
        await self._http.aclose()

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise EngineError("the engine is closed")

    # ------------------------------------------------------------ attempts

    async def _with_retries(self, path: str, body: Mapping[str, Any], read: Any, sticky: str) -> Any:
        self._check_open()
        async with self._slots:
            for number in range(1, self._settings.max_attempts + 1):
                state = await self._pick_endpoint(sticky)
                try:
                    async with self._send(state, path, body) as response:
                        return await read(response)
                except TransientError as transient:
                    if number == self._settings.max_attempts:
                        raise transient.error from transient
                    await self._pause(state, number, transient.wait_s)
        raise AssertionError("max_attempts is at least 1")

    @asynccontextmanager
    async def _send(self, state: _EndpointState, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        endpoint = state.endpoint
        state.in_flight += 1
        try:
            async with self._http.stream(
                "POST", endpoint.base_url + path, json=dict(body), headers=_authorization(endpoint)
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    self._raise_status(state, response)
                yield response
        except httpx.TimeoutException as error:
            raise TransientError(GenerationTimeoutError(f"{endpoint.base_url} gave no answer in time")) from error
        except AnswerTooLargeError as error:
            raise EngineError(str(error)) from error
        except httpx.TransportError as error:
            raise TransientError(EngineError(f"{endpoint.base_url} can't be reached: {error!r}")) from error
        finally:
            state.in_flight -= 1

    def _raise_status(self, state: _EndpointState, response: httpx.Response) -> None:
        status, message = response.status_code, _message(response.text)
        text = f"{state.endpoint.base_url} answered {status}: {message}"
        if status in REFUSED_KEY:
            state.refused = f"{text} (check rollout.remote.api_key)"
            if all(each.refused for each in self._endpoints):
                raise EngineError(state.refused)
            raise TransientError(EngineError(text), 0.0)
        if status in TRANSIENT:
            kind = EngineOverloadedError if status == 429 else EngineError
            raise TransientError(kind(text), _retry_after(response.headers))
        if any(words in response.text for words in CONTEXT_WORDS):
            raise ContextOverflowError(text)
        raise InvalidRequestError(text)

    async def _pick_endpoint(self, sticky: str) -> _EndpointState:
        """The episode's own endpoint while that is free, else the one that is free first; waits to keep the pace."""
        usable = [state for state in self._endpoints if not state.refused]
        if not usable:
            raise EngineError(f"no endpoint is left: {self._endpoints[-1].refused}")
        now = time.monotonic()
        state = min(usable, key=lambda each: (max(each.free_at - now, 0.0), each.in_flight))
        if sticky:
            own = usable[stable_hash(sticky) % len(usable)]
            state = own if own.free_at <= now else state
        start = max(now, state.free_at)
        if self._settings.requests_per_minute is not None:
            state.free_at = start + 60.0 / self._settings.requests_per_minute
        if start > now:
            await asyncio.sleep(start - now)
        return state

    async def _pause(self, state: _EndpointState, attempts: int, wait_s: float | None) -> None:
        if wait_s is None:
            wait_s = self._settings.first_pause_s * 2 ** (attempts - 1) * (0.5 + self._jitter.random())
        wait_s = min(wait_s, MAX_PAUSE_S)
        state.free_at = max(state.free_at, time.monotonic() + wait_s)
        others = [each for each in self._endpoints if each is not state and not each.refused]
        if not others:
            await asyncio.sleep(wait_s)


def stable_hash(text: str) -> int:
    """The same number for the same text in every process."""
    return zlib.crc32(text.encode())


def _authorization(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}


def _message(text: str) -> str:
    """The error message in an answer."""
    try:
        content = json.loads(text)
        error = content.get("error", content) if isinstance(content, dict) else content
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except json.JSONDecodeError:
        return text[:500]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
