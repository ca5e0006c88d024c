"""The gateway: an HTTP server in each process that runs episodes, on its service loop.

It knows nothing of models or tasks: it finds the episode that a key speaks for, and passes the request to its session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ajet.gateway.caller import Caller
from ajet.gateway.endpoints import answer, normal_path, not_found
from ajet.gateway.keys import InvalidKeyError, KeyRing, agent_key
from ajet.gateway.openai_chat import MODEL_PREFIX
from ajet.http.answer import Answer, error_answer, json_answer
from ajet.http.connection import HttpConnection, HttpLimits, HttpRequest, HttpServerState
from ajet.schema.chat import DEFAULT_AGENT
from ajet.schema.errors import EngineOverloadedError, ModelCallError, SessionClosedError
from ajet.session import EpisodeSession

log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""How often deadlines are looked at: small beside any deadline worth setting."""
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`ajet.gateway` of the configuration."""

    host: str = "127.0.0.1"
    port: int = 0
    key_ttl_s: float = 3600.0
    max_concurrent_per_episode: int = 64
    limits: HttpLimits = field(default_factory=HttpLimits)

    @classmethod
    def from_config(cls, config: Any) -> GatewaySettings:
        gateway = config.ajet.gateway
        body = int(gateway.max_body_mb * 1024 * 1024)
        return cls(
            host=gateway.host,
            port=gateway.port,
            key_ttl_s=gateway.key_ttl,
            max_concurrent_per_episode=gateway.max_concurrent_per_episode,
            limits=HttpLimits(gateway.header_deadline, gateway.body_deadline, body, max(4 * body, 64 * 1024 * 1024)),
        )


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """How an episode is reached from anywhere: by any of its agents (`model: ajet/<agent>`)."""

    base_url: str
    api_key: str
    model: str = MODEL_PREFIX + DEFAULT_AGENT

    def for_agent(self, agent: str, target: str) -> EpisodeKey:
        """The same for one agent alone."""
        return EpisodeKey(self.base_url, agent_key(self.api_key, agent, target), MODEL_PREFIX + agent)


Authorize = Callable[[str], Caller]
"""Finds the session an API key gives access to. Raises a `ModelCallError` if the key is wrong. Must be quick."""


class Gateway:
    """`await start()`, then `register` each episode's session; `aclose` at the end."""

    def __init__(self, settings: GatewaySettings | None = None, authorize: Authorize | None = None) -> None:
        """`authorize` decides which session answers a request; by default, the one its key was registered for."""
        self.settings = settings or GatewaySettings()
        self._authorize = authorize or self._registered
        self._keys = KeyRing(self.settings.key_ttl_s)
        self._episodes: dict[str, EpisodeSession] = {}
        self._registrations: dict[EpisodeSession, tuple[str, EpisodeKey]] = {}
        self._in_flight: Counter[EpisodeSession] = Counter()
        self._server: asyncio.Server | None = None
        self._state: HttpServerState | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._base_url = ""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        state = self._state = HttpServerState(self, self.settings.limits)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(state), self.settings.host, self.settings.port, backlog=BACKLOG
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._base_url = f"http://[{name}]:{port}/v1" if ":" in name else f"http://{name}:{port}/v1"
        self._sweeper = asyncio.create_task(self._sweep(state))

    @property
    def base_url(self) -> str:
        """`http://host:port/v1`"""
        if not self._base_url:
            raise RuntimeError("the gateway is not started")
        return self._base_url

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._state.connections) if self._state is not None else 0

    async def aclose(self) -> None:
        """Stop listening and cut all connections; what is being generated for them is cancelled."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        if self._state is not None:
            for connection in list(self._state.connections):
                connection.abort()
        self._episodes.clear()
        self._registrations.clear()
        await asyncio.sleep(0)  # let the connections' ends be seen

    async def _sweep(self, state: HttpServerState) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            state.sweep()

    # ------------------------------------------------------------ episodes

    def register(self, session: EpisodeSession) -> EpisodeKey:
        """Let an episode be reached; asked again, the same key. It ends with the session."""
        if session in self._registrations:
            return self._registrations[session][1]
        episode, api_key = self._keys.new_episode()
        key = EpisodeKey(self.base_url, api_key)
        self._registrations[session] = episode, key
        self._episodes[episode] = session
        session.on_close(lambda: self.unregister(session))
        return key

    def unregister(self, session: EpisodeSession) -> None:
        """Stop accepting the episode's keys."""
        if (registration := self._registrations.pop(session, None)) is not None:
            del self._episodes[registration[0]]

    # ------------------------------------------------------------ requests

    def admit(self, request: HttpRequest) -> Answer | None:
        request.path = normal_path(request.path)
        if request.path == "/healthz":
            return None
        if (missing := not_found(request.method, request.path)) is not None:
            return missing
        try:
            request.caller = self._caller(request)
        except ModelCallError as error:
            return error_answer(error, request.path)
        return None

    def _caller(self, request: HttpRequest) -> Caller:
        scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
        key = token if scheme.lower() == b"bearer" else request.headers.get(b"x-api-key", b"")
        if not key:
            raise InvalidKeyError("no API key: send 'Authorization: Bearer sk-ajet-…' or 'x-api-key: sk-ajet-…'")
        return self._authorize(key.strip().decode("latin-1"))

    def _registered(self, key: str) -> Caller:
        claim = self._keys.claim(key)
        session = self._episodes.get(claim.episode)
        if session is None:
            raise SessionClosedError("the episode of this key is over: it takes no more model calls")
        return Caller(session, claim.agent, claim.target)

    async def handle(self, request: HttpRequest) -> Answer:
        if request.path == "/healthz":
            return json_answer({"status": "ok", "episodes": len(self._episodes)})
        caller: Caller = request.caller
        running = self._in_flight[caller.session]
        if running >= self.settings.max_concurrent_per_episode:
            busy = EngineOverloadedError(f"more than {running} requests of this episode at the same time")
            return error_answer(busy, request.path)
        self._in_flight[caller.session] += 1
        streaming = False
        try:
            reply = await answer(request.method, request.path, request.body, caller)
            if not isinstance(reply.body, bytes):
                streaming = True
                self._leave_when_closed(reply, caller.session)
            return reply
        except Exception:
            log.exception("fault of the gateway in %s %s", request.method, request.path)
            return error_answer(ModelCallError("internal error of the gateway: see its log"), request.path)
        finally:
            if not streaming:
                self._leave(caller.session)

    def _leave(self, session: EpisodeSession) -> None:
        self._in_flight[session] -= 1
        if not self._in_flight[session]:
            del self._in_flight[session]

    def _leave_when_closed(self, reply: Answer, session: EpisodeSession) -> None:
        """A stream counts as a request until it ends."""
        close = reply.close
        open_ = [True]

        def closed() -> None:
            close()
            if open_:
                open_.clear()
                self._leave(session)

        reply.close = closed

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        error = type("HttpRefusal", (ModelCallError,), {"http_status": status, "code": code, "error_type": kind})
        return error_answer(error(message), request.path)
