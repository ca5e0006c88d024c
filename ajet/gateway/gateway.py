"""The gateway: the HTTP server through which agents reach their episode's session; one per process that runs episodes.

It knows nothing of models or tasks: it finds the episode that a key belongs to, and passes the request to its session.
`answer` takes an authorised request to its endpoint; clients in this process call it without HTTP.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from ajet.gateway.anthropic_messages import anthropic_error_body
from ajet.gateway.chat import EpisodeSession
from ajet.gateway.endpoints import (
    ANTHROPIC_PATHS,
    CONTROL_PATHS,
    COUNT_PATH,
    ENDPOINTS,
    EPISODES_PATH,
    GET,
    MAX_EPISODE_BYTES,
    MODELS_PATH,
    POST,
    PROMPT_PATHS,
    EpisodeOpener,
    answer_external,
    check_control_key,
    check_service_key,
    is_external,
    model,
    traces,
)
from ajet.gateway.openai_completions import chat_body, openai_error_body
from ajet.gateway.protocol import (
    AGENT_HEADER,
    MODEL_PREFIX,
    Caller,
    KeyScopeError,
    agent_scope,
    json_body,
    read_agent_header,
)
from ajet.observe.otlp import PATH as TRACES_PATH
from ajet.schema.chat import DEFAULT_AGENT
from ajet.schema.errors import EngineOverloadedError, InvalidRequestError, ModelCallError, SessionClosedError
from ajet.system.http_messages import (
    Answer,
    HttpLimits,
    HttpRequest,
    InvalidKeyError,
    KeyRing,
    is_loopback,
    json_answer,
    presented_key,
    without_port,
)
from ajet.system.http_server import HttpServer, tls_context

LARGE = 65_536
"""A body of this many bytes takes about a millisecond to decode. Larger ones are decoded on a thread."""
RETRY_AFTER_S = 1
"""How long clients should wait when the engine or the episode is overloaded."""
ANY_HOST = ("0.0.0.0", "::", "")
HOST = re.compile(r"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
KEY_TTL_S = 3600.0
"""How long keys are valid at least, unless the configuration says otherwise."""
PREFLIGHT_S = 600
"""How long a browser may remember that it was allowed."""
_REQUEST_HEADERS = f"authorization, content-type, x-api-key, anthropic-version, {AGENT_HEADER.decode()}"


async def answer(method: str, path: str, body: bytes, caller: Caller, content_type: str = "") -> Answer:
    """Answer an authorised request. What a client or the model does wrong becomes an error answer."""
    path = normal_path(path)
    try:
        check_route(method, path)
        if caller.control and path not in CONTROL_PATHS:
            raise KeyScopeError("this is the episode's control key: model calls need the agent's key")
        if path == TRACES_PATH:
            return await traces(body, content_type, caller)
        if method == "POST":
            most = caller.session.most_nodes
            decode = chat_body if path == "/v1/chat/completions" else json_body
            read = decode(body, most) if len(body) <= LARGE else await asyncio.to_thread(decode, body, most)
            return await POST[path](read, caller)
        if path in GET:
            return await GET[path]({}, caller)
        return await model({"model": unquote(path.removeprefix(MODELS_PATH))}, caller)
    except ModelCallError as error:
        return error_answer(error, path)


def error_answer(error: ModelCallError, path: str) -> Answer:
    """An error in the shape of the protocol spoken at `path`."""
    body = anthropic_error_body(error) if path in ANTHROPIC_PATHS else {"error": openai_error_body(error)}
    return json_answer(body, error.http_status, _error_headers(error))


def _error_headers(error: ModelCallError) -> dict[str, str]:
    """Official clients retry 409 and 5xx by themselves; here a retry helps only if the server is overloaded, or lost a
    process."""
    if error.http_status in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S), "x-should-retry": "true"}
    return {"x-should-retry": "false"}


def normal_path(path: str) -> str:
    """Some clients add a trailing slash, or `/v1` to a base URL that already ends in it."""
    while path.startswith("/v1/v1/"):
        path = path[3:]
    return path.rstrip("/")


class NotFoundError(InvalidRequestError):
    http_status = 404
    code = "not_found"


class MethodError(InvalidRequestError):
    http_status = 405
    code = "method_not_allowed"


def check_route(method: str, path: str) -> None:
    """Raises NotFoundError, or MethodError for a known path under another method."""
    table = (*POST, TRACES_PATH) if method == "POST" else GET if method == "GET" else ()
    if path in table or (method == "GET" and path.startswith(MODELS_PATH)):
        return
    if path in ENDPOINTS or path.startswith(MODELS_PATH):
        raise MethodError(f"{method:.20} is not allowed for {path}")
    raise NotFoundError(f"there is no {path or '/':.200}; endpoints: {', '.join(ENDPOINTS)}")


# ------------------------------------------------------------ the server


MOST_CALLS = 1_024
"""Requests of one episode, those that wait for their turn among them."""


@dataclass(slots=True)
class RunningCalls:
    """The requests of one episode that haven't been answered."""

    places: asyncio.Semaphore
    count: int = 0

    async def enter(self) -> None:
        """Wait for a place."""
        self.count += 1
        try:
            await self.places.acquire()
        except BaseException:
            self.count -= 1
            raise

    def leave(self) -> None:
        self.places.release()
        self.count -= 1


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The section `ajet.gateway` of the configuration."""

    host: str = "127.0.0.1"
    port: int = 0
    address_settings: str = "gateway.host or gateway.port"
    """The settings that the error message names when the gateway can't listen on the address."""
    key_ttl_s: float = KEY_TTL_S
    max_concurrent_per_episode: int = 64
    without_key: bool = False
    """Any key is accepted. Then only requests to a name of this machine are served: no web page whose name is made to
    lead here can send one."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call from a browser; `*` stands for all."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_config(cls, config: Any) -> GatewaySettings:
        gateway = config.ajet.gateway
        body = int(gateway.max_body_mb * 1024 * 1024)
        return cls(
            host=gateway.host,
            port=gateway.port,
            key_ttl_s=gateway.key_ttl or max(KEY_TTL_S, config.ajet.rollout.episode_timeout),
            max_concurrent_per_episode=gateway.max_concurrent_per_episode,
            allowed_origins=tuple(gateway.allowed_origins),
            tls=tls_context(gateway.tls_cert, gateway.tls_key, "gateway.tls_cert and gateway.tls_key"),
            limits=HttpLimits(max_body_bytes=body, max_buffered_bytes=max(4 * body, 64 * 1024 * 1024)),
        )


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """How to reach an episode from anywhere, as any of its agents (`model: ajet-<agent>`)."""

    base_url: str
    api_key: str
    model: str = MODEL_PREFIX + DEFAULT_AGENT
    control_key: str = ""
    """What rewards need. It can't be made from `api_key`, and isn't given to the agent."""


class _Registration(NamedTuple):
    """How requests can reach a session."""

    ids: tuple[str, str]
    """Those of the agent's key and of the control key."""
    key: EpisodeKey


Authorize = Callable[[str], Caller]
"""Finds the session an API key gives access to. Raises a `ModelCallError` if the key is wrong. Must be quick."""


class Gateway:
    """`await start()`, then `register` each episode's session; `aclose` at the end."""

    def __init__(self, settings: GatewaySettings | None = None, authorize: Authorize | None = None) -> None:
        """`authorize` decides which session answers a request; by default, the one its key was registered for."""
        self.settings = settings or GatewaySettings()
        self._authorize = authorize or self._registered
        self._keys = KeyRing(self.settings.key_ttl_s, "gateway.key_ttl")
        self._callers: dict[str, Caller] = {}
        """What each key gives access to, by its id."""
        self._registrations: dict[EpisodeSession, _Registration] = {}
        self._calls: WeakKeyDictionary[EpisodeSession, RunningCalls] = WeakKeyDictionary()
        self.external: EpisodeOpener | None = None
        """Begins episodes for external programs; None: the gateway accepts none."""
        self._server = HttpServer(self, self.settings.limits, self.settings.tls)
        self._local: HttpServer | None = None
        """Serves plain HTTP to processes of this machine, where the other server speaks TLS."""
        self._opening_local = asyncio.Lock()

    async def start(self) -> None:
        """Listen. Raises AddressError."""
        settings = self.settings
        await self._server.start(settings.host, settings.port, settings.address_settings)

    @property
    def base_url(self) -> str:
        """`http://host:port/v1`"""
        return f"{self._server.address.url}/v1"

    async def local_url(self) -> str:
        """The base URL for processes of this machine. A certificate doesn't name 127.0.0.1: they get plain HTTP there,
        from the first call of this on."""
        if self.settings.tls is None:
            return self.base_url
        async with self._opening_local:
            if self._local is None:
                local = HttpServer(self, self.settings.limits)
                await local.start("127.0.0.1", 0, self.settings.address_settings)
                self._local = local
        return f"{self._local.address.url}/v1"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._server.connections + (self._local.connections if self._local is not None else 0)

    async def aclose(self) -> None:
        """Stop listening and cut all connections; what is being generated for them is cancelled."""
        self._callers.clear()
        self._registrations.clear()
        await self._server.aclose()
        if self._local is not None:
            await self._local.aclose()

    # ------------------------------------------------------------ episodes

    def register(self, session: EpisodeSession) -> EpisodeKey:
        """Make an episode reachable until its session closes. Called again, it returns the same key."""
        if session in self._registrations:
            return self._registrations[session].key
        episode, api_key = self._keys.issue()
        control, control_key = self._keys.issue()
        key = EpisodeKey(self.base_url, api_key, control_key=control_key)
        self._registrations[session] = _Registration((episode, control), key)
        self._callers |= {episode: Caller(session), control: Caller(session, control=True)}
        session.on_close(lambda: self.unregister(session))
        return key

    def unregister(self, session: EpisodeSession) -> None:
        """Stop accepting the episode's keys."""
        if (registration := self._registrations.pop(session, None)) is not None:
            for key_id in registration.ids:
                del self._callers[key_id]

    # ------------------------------------------------------------ requests

    def admit(self, request: HttpRequest) -> Answer | None:
        request.path = normal_path(request.path)
        readable = self._for_browsers(request)
        if request.method == "OPTIONS" and readable:
            asked = request.headers.get(b"access-control-request-headers", b"").decode("latin-1")
            preflight = {
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": asked or _REQUEST_HEADERS,
                "access-control-max-age": str(PREFLIGHT_S),
            }
            return Answer(204, b"", {**readable, **preflight})
        try:
            self._check(request)
        except ModelCallError as error:
            refused = error_answer(error, request.path)
            refused.headers |= readable
            return refused
        return None

    def _for_browsers(self, request: HttpRequest) -> dict[str, str]:
        """The headers that let a web page of an allowed origin read an answer; none for others."""
        origin = request.headers.get(b"origin", b"").decode("latin-1")
        if not origin or not {origin, "*"} & set(self.settings.allowed_origins):
            return {}
        return {"access-control-allow-origin": origin, "vary": "origin"}

    def _check(self, request: HttpRequest) -> None:
        """Raises a ModelCallError."""
        if self.settings.without_key:
            host = without_port(request.headers.get(b"host", b"").decode("latin-1"))
            if not is_loopback(host):
                raise InvalidKeyError(f"without a key, only requests to localhost are served, not to {host[:100]!r}")
        if request.path == "/healthz":
            request.unauthenticated = True
            return
        external = self.external is not None and is_external(request.path)
        if external:
            if request.method != "POST":
                raise MethodError(f"{request.method:.20} is not allowed for {request.path}")
            request.max_body = MAX_EPISODE_BYTES
        else:
            check_route(request.method, request.path)
        if self.external is not None and request.path == EPISODES_PATH:
            check_service_key(self.external, presented_key(request))
            return
        caller = self._authorize(presented_key(request))
        named = read_agent_header(request.headers.get(AGENT_HEADER, b""))
        if external:
            check_control_key(request.path, caller)
        request.caller = replace(caller, named=named) if named else caller
        if request.path in PROMPT_PATHS and (most := caller.session.most_bytes) is not None:
            request.max_body = most
            length = request.headers.get(b"content-length", b"")
            if length.isdigit():
                caller.session.check_size(int(length[:12]), asked=request.path != COUNT_PATH)

    def _registered(self, key: str) -> Caller:
        """The session a key of ours belongs to."""
        claim = self._keys.claim(key)
        caller = self._callers.get(claim.id)
        if caller is None or (caller.control and claim.scope is not None):
            raise SessionClosedError("this key's episode is over: it takes no more model calls, rewards or spans")
        return caller if caller.control else Caller(caller.session, *agent_scope(claim.scope))

    async def handle(self, request: HttpRequest) -> Answer:
        try:
            reply = await self._handle(request)
        except ModelCallError as error:
            reply = error_answer(error, request.path)
        reply.headers |= self._for_browsers(request)
        return reply

    async def _handle(self, request: HttpRequest) -> Answer:
        if request.path == "/healthz":
            return json_answer({"status": "ok"})
        if self.external is not None and is_external(request.path):
            return await answer_external(request.path, request.body, self.external, self._known_as(request))
        caller: Caller = request.caller
        calls = self._calls.get(caller.session)
        if calls is None:
            calls = self._calls[caller.session] = RunningCalls(
                asyncio.Semaphore(self.settings.max_concurrent_per_episode)
            )
        if calls.count >= MOST_CALLS:
            raise EngineOverloadedError(f"this episode already has {calls.count} requests here: try again later")
        await calls.enter()
        streaming = False
        try:
            kind = request.headers.get(b"content-type", b"").decode("latin-1")
            reply = await answer(request.method, request.path, request.body, caller, kind)
            streaming = not isinstance(reply.body, bytes)
        finally:
            if not streaming:
                calls.leave()
        if streaming:  # it counts as a request until it ends
            close = reply.close

            def closed() -> None:
                close()
                calls.leave()

            reply.close = closed
        return reply

    def _known_as(self, request: HttpRequest) -> str:
        """Where the sender of a request finds this gateway: if it listens on every address, by the name in use."""
        host = request.headers.get(b"host", b"").decode("latin-1")
        if self.settings.host not in ANY_HOST or not HOST.fullmatch(host):
            return self.base_url
        return f"{self._server.address.scheme}://{host}/v1"

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        error = type("HttpRefusal", (ModelCallError,), {"http_status": status, "code": code, "error_type": kind})
        answer = error_answer(error(message), request.path)
        answer.headers |= self._for_browsers(request)
        return answer
