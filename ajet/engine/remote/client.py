"""Which servers, which keys, how patiently."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EngineOverloadedError,
    GenerationTimeoutError,
    InvalidRequestError,
    ModelCallError,
)

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address with one key."""

    base_url: str
    """Up to and including `/v1`."""
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a remote model is reached."""

    endpoints: tuple[Endpoint, ...]
    model: str
    """The name that the server knows it by."""
    max_model_len: int = 18000
    max_parallel: int = 32
    """Requests under way at the same time, over all endpoints."""
    requests_per_minute: float | None = None
    """Requests begun per minute and endpoint."""
    max_attempts: int = 6
    """How often one request is tried before it fails."""
    timeout_s: float = 600.0
    """Seconds for one attempt, where the request has no deadline of its own."""
    first_pause_s: float = 0.5
    """Pause before the second attempt; it doubles from one attempt to the next."""

    @classmethod
    def from_config(cls, config: Any) -> RemoteSettings:
        """Read `ajet.rollout.remote`; the model's name is `model.path` where none is given."""
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
    """Several addresses and several keys: one of either goes with all of the other, equally many go in pairs."""
    given = [base_url] if isinstance(base_url, str) else list(base_url or [])
    urls = given or [url for url in [os.environ.get("OPENAI_BASE_URL", "")] if url]
    keys = [api_key] if isinstance(api_key, str) else list(api_key or [])
    keys = keys or [os.environ.get("OPENAI_API_KEY", "")]
    if not urls:
        raise ConfigError("rollout.engine: remote needs rollout.remote.base_url (or OPENAI_BASE_URL)")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.remote.base_url {url!r} is no http:// or https:// address")
    if len(urls) > 1 and len(keys) > 1 and len(urls) != len(keys):
        raise ConfigError(f"rollout.remote: {len(urls)} base_url and {len(keys)} api_key can't be paired")
    count = max(len(urls), len(keys))
    urls = urls * count if len(urls) == 1 else urls
    keys = keys * count if len(keys) == 1 else keys
    return tuple(Endpoint(url.rstrip("/"), key) for url, key in zip(urls, keys, strict=True))


PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may well succeed."""
REFUSED_KEY = frozenset({401, 403})
LONGEST_PAUSE_S = 30.0
CONTEXT_WORDS = ("context_length_exceeded", "maximum context length", "max_model_len", "longer than the maximum")


@dataclass(slots=True)
class Line:
    """One endpoint and what is known about it."""

    endpoint: Endpoint
    free_at: float = 0.0
    """Monotonic time from which it may be asked again."""
    refused: str = ""
    """Why its key is not used any more."""
    in_flight: int = 0


class PassingError(Exception):
    """An attempt that failed for a reason that may pass."""

    def __init__(self, error: ModelCallError, wait_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


class RemoteClient:
    """Sends JSON, gets JSON. One for each event loop."""

    def __init__(self, settings: RemoteSettings, seed: int | None = None) -> None:
        import httpx

        self._settings = settings
        self._lines = [Line(endpoint) for endpoint in settings.endpoints]
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.timeout_s, connect=10.0), limits=_limits(settings)
        )
        self._places = asyncio.Semaphore(settings.max_parallel)
        self._jitter = random.Random(seed)
        self.requests = 0
        self.retries = 0

    async def post(self, path: str, body: Mapping[str, Any], *, sticky: str = "") -> dict[str, Any]:
        """One request and its JSON answer."""

        async def attempt(response: httpx.Response) -> dict[str, Any]:
            await response.aread()
            try:
                answer = response.json()
            except json.JSONDecodeError as error:
                raise PassingError(EngineError(f"the server's answer is no JSON: {response.text[:200]!r}")) from error
            if not isinstance(answer, dict):
                raise EngineError(f"the server's answer is no JSON object: {response.text[:200]!r}")
            return answer

        answer: dict[str, Any] = await self._with_retries(path, body, attempt, sticky)
        return answer

    async def stream(self, path: str, body: Mapping[str, Any], on_event: Any, *, sticky: str = "") -> None:
        """One request whose answer is a stream of events. Tried again only until the first event came."""

        async def attempt(response: httpx.Response) -> None:
            begun = False
            try:
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                        begun = True
                        on_event(json.loads(data))
            except (PassingError, json.JSONDecodeError) as error:
                raise EngineError(f"the server's stream broke off: {error}") from error
            except Exception as error:
                if begun and _is_http_fault(error):
                    raise EngineError(f"the server's stream broke off: {error!r}") from error
                raise

        await self._with_retries(path, {**body, "stream": True}, attempt, sticky)

    async def control(self, path: str, body: Mapping[str, Any]) -> None:
        """Tell a server to do something; `path` starts at the server's root, not at `/v1`."""
        await self._control(self._lines[0].endpoint, path, body)

    async def control_all(self, path: str, body: Mapping[str, Any]) -> None:
        """Tell all of them."""
        await asyncio.gather(*(self._control(line.endpoint, path, body) for line in self._lines))

    async def _control(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> None:
        import httpx

        root = endpoint.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        try:
            response = await self._http.post(root + path, json=dict(body), headers=headers)
        except httpx.HTTPError as error:
            raise EngineError(f"{root}{path} failed: {error!r}") from error
        if response.status_code >= 400:
            raise EngineError(f"{root}{path} answered {response.status_code}: {_message(response.text)}")

    async def aclose(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------ attempts

    async def _with_retries(self, path: str, body: Mapping[str, Any], attempt: Any, sticky: str) -> Any:
        self.requests += 1
        async with self._places:
            for number in range(1, self._settings.max_attempts + 1):
                line = await self._free_line(sticky)
                try:
                    async with self._send(line, path, body) as response:
                        return await attempt(response)
                except PassingError as passing:
                    if number == self._settings.max_attempts:
                        raise passing.error from passing
                    self.retries += 1
                    await self._pause(line, number, passing.wait_s)
        raise AssertionError("max_attempts is at least 1")

    @asynccontextmanager
    async def _send(self, line: Line, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        import httpx

        key = line.endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        line.in_flight += 1
        try:
            async with self._http.stream(
                "POST", line.endpoint.base_url + path, json=dict(body), headers=headers
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    self._raise_status(line, response)
                yield response
        except httpx.TimeoutException as error:
            raise PassingError(GenerationTimeoutError(f"{line.endpoint.base_url} gave no answer in time")) from error
        except httpx.TransportError as error:
            raise PassingError(EngineError(f"{line.endpoint.base_url} can't be reached: {error!r}")) from error
        finally:
            line.in_flight -= 1

    def _raise_status(self, line: Line, response: httpx.Response) -> None:
        status, said = response.status_code, _message(response.text)
        where = f"{line.endpoint.base_url} answered {status}: {said}"
        if status in REFUSED_KEY:
            line.refused = where
            if all(each.refused for each in self._lines):
                raise EngineError(f"{where} (check rollout.remote.api_key)")
            raise PassingError(EngineError(where), 0.0)
        if status in PASSING:
            kind = EngineOverloadedError if status == 429 else EngineError
            raise PassingError(kind(where), _retry_after(response.headers))
        if any(words in response.text for words in CONTEXT_WORDS):
            raise ContextOverflowError(where)
        raise InvalidRequestError(where)

    async def _free_line(self, sticky: str) -> Line:
        """The endpoint to ask: the episode's own while it is well, else the one that is free first; not too often."""
        usable = [line for line in self._lines if not line.refused]
        if not usable:
            raise EngineError(f"no endpoint is left: {self._lines[-1].refused}")
        now = time.monotonic()
        line = min(usable, key=lambda each: (max(each.free_at - now, 0.0), each.in_flight))
        if sticky:
            own = usable[hash_of(sticky) % len(usable)]
            line = own if own.free_at <= now else line
        start = max(now, line.free_at)
        if self._settings.requests_per_minute is not None:
            line.free_at = start + 60.0 / self._settings.requests_per_minute
        if start > now:
            await asyncio.sleep(start - now)
        return line

    async def _pause(self, line: Line, attempts: int, wait_s: float | None) -> None:
        if wait_s is None:
            wait_s = self._settings.first_pause_s * 2 ** (attempts - 1) * (0.5 + self._jitter.random())
        wait_s = min(wait_s, LONGEST_PAUSE_S)
        line.free_at = max(line.free_at, time.monotonic() + wait_s)
        others = [each for each in self._lines if each is not line and not each.refused]
        if not others:
            await asyncio.sleep(wait_s)


def hash_of(text: str) -> int:
    """The same number for the same text in every process."""
    import zlib

    return zlib.crc32(text.encode())


def _limits(settings: RemoteSettings) -> httpx.Limits:
    import httpx

    return httpx.Limits(max_connections=settings.max_parallel, max_keepalive_connections=settings.max_parallel)


def _is_http_fault(error: Exception) -> bool:
    import httpx

    return isinstance(error, httpx.HTTPError)


def _message(text: str) -> str:
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
