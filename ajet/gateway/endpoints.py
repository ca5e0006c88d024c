"""Which function answers which path, and the endpoints of no chat protocol: rewards, embeddings, spans, and the
episodes of external programs.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from ajet.gateway import protocol
from ajet.gateway.anthropic_messages import count_tokens, messages
from ajet.gateway.openai_completions import chat_completions, completions
from ajet.gateway.openai_responses import responses
from ajet.gateway.protocol import MODEL_PREFIX, BadField, Caller, KeyScopeError, json_body, read_model
from ajet.observe.otlp import MAX_BYTES, MAX_SPANS, Rejected, receive
from ajet.observe.otlp import PATH as TRACES_PATH
from ajet.observe.tracing import by_our_clock
from ajet.schema.chat import DEFAULT_AGENT, bare_call_id
from ajet.schema.errors import EngineError, ModelCallError, RewardError, UserError
from ajet.schema.span import Span
from ajet.schema.task import finite_reward
from ajet.system.http_messages import Answer, HttpLimits, HttpRequest, InvalidKeyError, json_answer, presented_key
from ajet.system.http_server import HttpServer

log = logging.getLogger(__name__)

Endpoint = Callable[[dict[str, Any], Caller], Awaitable[Answer]]


async def rewards(body: dict[str, Any], caller: Caller) -> Answer:
    """`POST /v1/rewards` `{"reward": 1.0, "call": "chatcmpl-…"?, "agent": "…"?, "replace": true?}`.

    With the control key: an agent that could reward itself would be trained to do so."""
    if not caller.control:
        raise KeyScopeError("rewards need the episode's control key (tuner.control_key()): an agent's key gives none")
    value = _reward(body.get("reward"))
    given = {key: protocol.text(body, key) for key in ("call", "agent") if body.get(key) is not None}
    call, agent = bare_call_id(given.get("call")), given.get("agent")
    replace = protocol.flag(body, "replace")
    if replace and call is None:
        raise BadField("replace", "replace needs a call: the one whose reward replaces the outcome")
    try:
        caller.session.reward(value, call=call, agent=agent, replace=replace)
    except RewardError as error:  # no such call or agent
        raise BadField("agent" if call is None else "call", str(error)) from None
    return json_answer({"object": "reward", "reward": value, "call": call, "agent": agent, "replace": replace})


def _reward(given: Any) -> float:
    try:
        return finite_reward(given, "reward")
    except RewardError as error:
        raise BadField("reward", str(error)) from None


_EMBEDDING_FIELDS = ("input", "dimensions", "encoding_format", "user")


class NoEmbeddingsError(ModelCallError):
    """No embedding model is configured."""

    http_status = 501
    code = "not_implemented"
    error_type = "invalid_request_error"


async def embeddings(body: dict[str, Any], caller: Caller) -> Answer:
    """The model is always `helper.embedding_model`, whatever the client calls it."""
    endpoint = caller.session.settings.embeddings
    if endpoint is None:
        raise NoEmbeddingsError("no embedding model is configured: set ajet.helper.embedding_model and helper.base_url")
    if not isinstance(body.get("input"), str | list) or not body["input"]:
        raise BadField("input", "input must be a non-empty string or a list")
    caller.session.check_open()
    from openai import APIStatusError, AsyncOpenAI, OpenAIError

    asked = {**{key: body[key] for key in _EMBEDDING_FIELDS if key in body}, "model": endpoint.model}
    try:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            answer: dict[str, Any] = await client.post("/embeddings", body=asked, cast_to=dict[str, Any])
    except APIStatusError as error:
        if error.status_code == 400:
            raise BadField("input", f"the embedding model refused the request: {error}") from None
        raise EngineError(f"the embedding model failed: {error}") from error
    except OpenAIError as error:
        raise EngineError(f"the embedding model failed: {type(error).__name__}: {error}") from error
    return json_answer(answer)


async def models(body: dict[str, Any], caller: Caller) -> Answer:
    """`GET /v1/models`: the model, under the agent's name."""
    name = MODEL_PREFIX + (caller.agent or DEFAULT_AGENT)
    page = {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}
    return json_answer(page)


async def model(body: dict[str, Any], caller: Caller) -> Answer:
    """`GET /v1/models/<name>`: requests may use any name, so each is a model, unless it is another agent's."""
    return json_answer(_model(read_model(body, caller).name))


def _model(name: str) -> dict[str, Any]:
    """A model as both protocols describe one."""
    for_anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "ajet", **for_anthropic}


async def traces(body: bytes, content_type: str, caller: Caller) -> Answer:
    """`POST /v1/traces`: keep OpenTelemetry spans, as OTLP protobuf or JSON, with the episode. Rewards in them count
    only with the control key."""
    session = caller.session
    session.check_open()

    async def keep(spans: Sequence[Span], left_out: int) -> Rejected:
        session.check_open()
        session.spans.leave_out(left_out)
        session.add_spans(by_our_clock(spans, time.time()), rewards_count=caller.control)
        return Rejected(left_out, "the episode keeps no more spans")

    return await receive(body, content_type, session.spans.room, keep)


POST: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/v1/rewards": rewards,
}
GET: dict[str, Endpoint] = {"/v1/models": models}
ENDPOINTS = (*POST, TRACES_PATH, *GET)
CONTROL_PATHS = ("/v1/rewards", TRACES_PATH)
"""Where the control key is accepted."""
MODELS_PATH = "/v1/models/"
PROMPT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
)
"""Requests whose body becomes a prompt, and can't be larger than one."""
COUNT_PATH = "/v1/messages/count_tokens"
ANTHROPIC_PATHS = ("/v1/messages", COUNT_PATH)


# ------------------------------------------------------------ episodes of external programs

EPISODES_PATH = "/v1/episodes"
MAX_EPISODE_BYTES = 1024 * 1024
"""The most bytes of a task, or of an episode's metadata."""
MAX_EPISODE_NODES = 16_384
"""The most objects and arrays in them."""


class EpisodeOpener(Protocol):
    """Begins and ends the episodes of external programs."""

    service_key: str

    async def begin(self, task: dict[str, Any]) -> dict[str, Any]:
        """A new episode's `episode_id`, `base_url`, `api_key`, `control_key`, `deadline`. Raises a ModelCallError."""
        ...

    def end(self, episode_id: str, outcome: dict[str, Any]) -> None:
        """The episode is over: `reward`, `is_success`, `metadata`, `failure`. Raises a ModelCallError."""
        ...


def is_external(path: str) -> bool:
    """Whether a path begins or ends an external episode."""
    return path == EPISODES_PATH or (
        path.startswith(f"{EPISODES_PATH}/") and path.endswith("/end") and path.count("/") == 4
    )


def check_service_key(episodes: EpisodeOpener, key: str) -> None:
    """Raises InvalidKeyError unless this is the service's key."""
    if not hmac.compare_digest(key.encode(), episodes.service_key.encode()):
        raise InvalidKeyError("wrong key: to begin an episode needs the service's key (AJET_SERVICE_KEY)")


def check_control_key(path: str, caller: Caller) -> None:
    """Raises KeyScopeError unless the caller holds the control key of the episode that the path ends."""
    if not caller.control or caller.session.episode_id != path.split("/")[3]:
        raise KeyScopeError("to end an episode needs its control key")


async def answer_external(path: str, body: bytes, episodes: EpisodeOpener, base_url: str) -> Answer:
    """Answer a request whose key was checked. `base_url`: where its sender finds the gateway. Raises a
    ModelCallError."""
    given = json_body(body, MAX_EPISODE_NODES) if body else {}
    if path == EPISODES_PATH:
        _refuse_unknown(given, ("task",))
        return json_answer({**await episodes.begin(protocol.mapping(given, "task")), "base_url": base_url})
    episode_id = path.split("/")[3]
    episodes.end(episode_id, _outcome(given))
    return json_answer({"episode_id": episode_id, "ended": True})


def _refuse_unknown(given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise for a field of another name: left out, it would cost the episode its task or its reward."""
    unknown = given.keys() - set(known)
    if unknown:
        raise BadField(min(unknown), f"no such field: {min(unknown):.80}; fields: {', '.join(known)}")


def _outcome(given: dict[str, Any]) -> dict[str, Any]:
    _refuse_unknown(given, ("reward", "is_success", "metadata", "failure"))
    reward, success = given.get("reward"), given.get("is_success")
    return {
        "reward": None if reward is None else _reward(reward),
        "is_success": None if success is None else protocol.flag(given, "is_success"),
        "metadata": protocol.mapping(given, "metadata"),
        "failure": protocol.text(given, "failure"),
    }


# ------------------------------------------------------------ spans of programs outside an episode

TOKEN_PATH = "/v3/auth/token"
"""Where an AgentOps client changes its key for a token. Here they are the same."""
LOGS_PATH = "/v4/logs/upload/"
"""Where it sends the program's output, which is accepted and dropped."""
HEALTH_PATH = "/healthz"
Sink = Callable[[Sequence[Span]], Awaitable[None]]
"""Keeps spans. Raises a UserError if it can't."""


class SpanCollector:
    """An HTTP server that takes the spans of AgentOps clients and OTLP exporters, and hands them to a sink."""

    def __init__(self, key: str, sink: Sink) -> None:
        self._key, self._sink = key, sink
        self._server = HttpServer(self, HttpLimits(max_body_bytes=MAX_BYTES))
        self.received = 0
        """Spans so far."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises AddressError."""
        await self._server.start(host, port, "--host or --port")

    @property
    def url(self) -> str:
        return self._server.address.url

    async def aclose(self) -> None:
        await self._server.aclose()

    def admit(self, request: HttpRequest) -> Answer | None:
        if request.path in (HEALTH_PATH, TOKEN_PATH):
            request.unauthenticated = True
        if request.path == HEALTH_PATH:
            return None
        if request.path not in (TRACES_PATH, TOKEN_PATH, LOGS_PATH):
            return _error(404, f"no such path: {request.path[:200]}; traces go to {TRACES_PATH}")
        if request.method != "POST":
            return _error(405, f"{request.path} takes POST")
        if request.path == TOKEN_PATH:  # the key is in the body
            return None
        try:
            given = presented_key(request)
        except InvalidKeyError as error:
            return _error(401, str(error))
        return None if self._fits(given) else _error(401, "not this endpoint's key")

    async def handle(self, request: HttpRequest) -> Answer:
        if request.path == HEALTH_PATH:
            return json_answer({"status": "ok"})
        if request.path == TOKEN_PATH:
            return self._token(request.body)
        if request.path == LOGS_PATH:
            return json_answer({"id": "", "url": ""})
        kind = request.headers.get(b"content-type", b"").decode("latin-1")
        try:
            return await receive(request.body, kind, MAX_SPANS, self._keep)
        except UserError as error:  # the sink's: exporters repeat what is answered so
            log.warning("%s", error)
            return _error(503, str(error))

    async def _keep(self, spans: Sequence[Span], left_out: int) -> Rejected:
        await self._sink(spans)
        self.received += len(spans)
        return Rejected(left_out, f"a request holds {MAX_SPANS} spans at most")

    def _token(self, body: bytes) -> Answer:
        try:
            given: Any = msgspec.json.decode(body, type=dict[str, Any]).get("api_key")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            given = None
        if not isinstance(given, str) or not self._fits(given):
            return _error(401, "not this endpoint's key")
        return json_answer({"token": self._key, "project_id": "ajet", "project_prem_status": "pro"})

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._key.encode())

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        return _error(status, message)


def _error(status: int, message: str) -> Answer:
    return json_answer({"error": {"message": message}}, status)
