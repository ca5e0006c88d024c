"""Every request to a store: as data and as bytes, who may send it, and the errors that answer it.

`RolloutStore`'s methods make them; `ajet/store/operations.py` carries them out. A `request_id` makes a request
idempotent: the store remembers it, and answers the second one like the first. What JSON has no word for is refused
before it leaves this process.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from ajet.schema.errors import UserError
from ajet.schema.span import Id, JsonObject, KnownId, Span
from ajet.store.records import (
    Attempt,
    AttemptedRollout,
    Json,
    Mode,
    Page,
    ProtocolInfo,
    Resources,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Statistics,
    Worker,
    WorkerStatus,
)

T = TypeVar("T")

PROTOCOL = 2
"""Raised when a client and a store of different versions would misunderstand each other. 2: a runner gets its episode's
control key, and spans leave out what has its default."""
MAX_BATCH = 10_000
MAX_WAIT_S = 60.0
"""The longest wait of one request. Clients that wait longer repeat it."""

Ids = Annotated[list[KnownId], Meta(max_length=MAX_BATCH)]
Limit = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Offset = Annotated[int, Meta(ge=0, le=2**53)]
WaitSeconds = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]


class Role(StrEnum):
    """What a key is for."""

    WRITER = "writer"
    """Enqueues and cancels rollouts, publishes resources, waits for results."""
    READER = "reader"
    """Sees everything, changes nothing."""
    RUNNER = "runner"
    """Claims rollouts, and sees and reports those it has claimed."""


class StoreRequest(Struct, Generic[T], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request whose answer is a T."""


class NewRollout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What a rollout is given when it is enqueued."""

    input: Json
    mode: Mode | None = None
    resources_id: Id | None = None
    """null: the latest resources there are now, if any."""
    config: RolloutConfig = RolloutConfig()
    metadata: JsonObject = field(default_factory=dict)


class AttemptRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    rollout_id: KnownId
    attempt_id: KnownId


class AttemptUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Changes of an attempt; what is left out stays. Only `status` can change the rollout."""

    rollout_id: KnownId
    attempt_id: KnownId
    status: Literal["succeeded", "failed"] | UnsetType = UNSET
    result: Json | UnsetType = UNSET
    metadata: JsonObject | UnsetType = UNSET


class Enqueue(StoreRequest[list[Rollout]], frozen=True, kw_only=True):
    rollouts: Annotated[list[NewRollout], Meta(max_length=MAX_BATCH)]
    request_id: Id | None = None


class Claim(StoreRequest[list[AttemptedRollout]], frozen=True, kw_only=True):
    worker_id: Id
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    wait_seconds: WaitSeconds = 0.0
    """How long to wait while the queue is empty."""
    request_id: Id | None = None


class StartRollout(StoreRequest[AttemptedRollout], frozen=True, kw_only=True):
    rollout: NewRollout
    worker_id: Id | None = None
    request_id: Id | None = None


class StartAttempt(StoreRequest[AttemptedRollout], frozen=True, kw_only=True):
    rollout_id: KnownId
    worker_id: Id | None = None
    request_id: Id | None = None


class Heartbeat(StoreRequest[list[Attempt]], frozen=True, kw_only=True):
    worker_id: Id
    attempts: Annotated[list[AttemptRef], Meta(max_length=1000)] = field(default_factory=list)
    stats: JsonObject = field(default_factory=dict)


class UpdateAttempts(StoreRequest[list[Attempt]], frozen=True, kw_only=True):
    updates: Annotated[list[AttemptUpdate], Meta(max_length=MAX_BATCH)]


class AddSpans(StoreRequest[int], frozen=True, kw_only=True):
    spans: Annotated[list[Span], Meta(max_length=MAX_BATCH)]


class NextSequenceIds(StoreRequest[list[int]], frozen=True, kw_only=True):
    rollout_id: KnownId
    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 1


class Cancel(StoreRequest[list[Rollout]], frozen=True, kw_only=True):
    rollout_ids: Ids


class UpdateRollout(StoreRequest[Rollout], frozen=True, kw_only=True):
    """Changes of what a rollout is given; what is left out stays."""

    rollout_id: KnownId
    input: Json | UnsetType = UNSET
    mode: Mode | UnsetType | None = UNSET
    resources_id: Id | UnsetType | None = UNSET
    config: RolloutConfig | UnsetType = UNSET
    metadata: JsonObject | UnsetType = UNSET


class PublishResources(StoreRequest[Resources], frozen=True, kw_only=True):
    resources: JsonObject
    resources_id: Id | None = None
    """An existing one gets its next version. null: a new id."""
    request_id: Id | None = None


class Wait(StoreRequest[list[AttemptedRollout]], frozen=True, kw_only=True):
    rollout_ids: Ids
    wait_seconds: WaitSeconds = 0.0


class QueryRollouts(StoreRequest[Page[AttemptedRollout]], frozen=True, kw_only=True):
    """In the order in which they were enqueued."""

    rollout_ids: Ids | None = None
    status_in: list[RolloutStatus] | None = None
    id_contains: str = ""
    descending: bool = False
    """The last one that was enqueued first."""
    limit: Limit = 100
    offset: Offset = 0


class QueryAttempts(StoreRequest[list[Attempt]], frozen=True, kw_only=True):
    rollout_id: KnownId


class QuerySpans(StoreRequest[Page[Span]], frozen=True, kw_only=True):
    rollout_id: KnownId
    attempt_id: Id | None = None
    """An attempt's id, or `latest`. null: all attempts."""
    name: str | None = None
    name_contains: str = ""
    trace_id: str | None = None
    parent_id: str | None = None
    limit: Limit = 1000
    offset: Offset = 0


class QueryResources(StoreRequest[Page[Resources]], frozen=True, kw_only=True):
    """Newest first."""

    resources_id: Id | None = None
    version: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    limit: Limit = 100
    offset: Offset = 0


class QueryWorkers(StoreRequest[Page[Worker]], frozen=True, kw_only=True):
    status_in: list[WorkerStatus] | None = None
    id_contains: str = ""
    limit: Limit = 100
    offset: Offset = 0


class GetStatistics(StoreRequest[Statistics], frozen=True, kw_only=True):
    pass


class StoreOperation(NamedTuple):
    """A request's path and types, and the keys that may send it."""

    path: str
    request: type[StoreRequest[Any]]
    answer: Any
    roles: frozenset[Role]
    summary: str


_WRITE = frozenset({Role.WRITER})
_READ = frozenset({Role.READER, Role.WRITER})
_SEE = _READ | {Role.RUNNER}
_RUN = frozenset({Role.RUNNER})

OPERATIONS = (
    StoreOperation("rollouts/enqueue", Enqueue, list[Rollout], _WRITE, "Add rollouts to the queue's end."),
    StoreOperation("rollouts/claim", Claim, list[AttemptedRollout], _RUN, "Take rollouts from the queue's head."),
    StoreOperation("rollouts/start", StartRollout, AttemptedRollout, _WRITE, "Start a rollout without queueing it."),
    StoreOperation("rollouts/cancel", Cancel, list[Rollout], _WRITE, "Cancel rollouts that have not ended."),
    StoreOperation("rollouts/update", UpdateRollout, Rollout, _WRITE, "Change what a rollout is given."),
    StoreOperation("rollouts/wait", Wait, list[AttemptedRollout], _READ, "Wait until all of these have ended."),
    StoreOperation("rollouts/query", QueryRollouts, Page[AttemptedRollout], _READ, "Rollouts with their last attempt."),
    StoreOperation("attempts/start", StartAttempt, AttemptedRollout, _WRITE, "Start another attempt by hand."),
    StoreOperation("attempts/heartbeat", Heartbeat, list[Attempt], _RUN, "Say that these attempts are alive."),
    StoreOperation("attempts/update", UpdateAttempts, list[Attempt], _RUN, "Report how attempts ended."),
    StoreOperation("attempts/query", QueryAttempts, list[Attempt], _SEE, "All attempts at a rollout."),
    StoreOperation("spans/add", AddSpans, int, _RUN, "Add spans. Those already known are not added again."),
    StoreOperation("spans/sequence", NextSequenceIds, list[int], _RUN, "Reserve numbers for spans."),
    StoreOperation("spans/query", QuerySpans, Page[Span], _SEE, "A rollout's spans in their order."),
    StoreOperation("resources/publish", PublishResources, Resources, _WRITE, "Add a version of resources."),
    StoreOperation("resources/query", QueryResources, Page[Resources], _SEE, "Versions of resources, newest first."),
    StoreOperation("workers/query", QueryWorkers, Page[Worker], _READ, "Workers and what they do."),
    StoreOperation("statistics", GetStatistics, Statistics, _READ, "How much the store holds."),
)
"""Every request, by its path below `/v1/store/`."""

OPERATION_OF = {operation.request: operation for operation in OPERATIONS}
SMALL = frozenset({Enqueue, StartRollout, Heartbeat, UpdateAttempts, AddSpans, NextSequenceIds})
"""Requests that may come together, as the items of one: they are many, and none of them waits for anything."""
READING: frozenset[type[StoreRequest[Any]]] = frozenset(
    {Wait, QueryRollouts, QueryAttempts, QuerySpans, QueryResources, QueryWorkers, GetStatistics}
)
"""Requests that write nothing."""
REGAINED: frozenset[type[StoreRequest[Any]]] = frozenset({Claim, Heartbeat})
"""Requests whose effect may be lost if the machine (not the process) stops: the rollout is then attempted again."""


class StoreError(UserError):
    """A request that a store refuses. The message says what to do about it."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"


class UnknownIdError(StoreError):
    """The store has no such rollout, attempt or resources."""

    http_status = 404
    code = "unknown_id"


class ConflictError(StoreError):
    """The request is valid, but the rollout's status doesn't allow it."""

    http_status = 409
    code = "conflict"


class KeyRefusedError(StoreError):
    """There is no key, or it is wrong or has expired."""

    http_status = 401
    code = "invalid_key"


class NotAllowedError(StoreError):
    """The key is valid, but its role doesn't allow this."""

    http_status = 403
    code = "not_allowed"


class ProtocolMismatchError(StoreError):
    """Client and store speak different versions."""

    http_status = 426
    code = "protocol_mismatch"


class StoreUnavailableError(StoreError):
    """The store can't be reached, or can't write. Nothing was acknowledged; the client may try again."""

    http_status = 503
    code = "unavailable"


def error_of(code: str, message: str) -> StoreError:
    """Make the error that a store answered with."""
    kinds = {kind.code: kind for kind in StoreError.__subclasses__()}
    return kinds.get(code, StoreError)(message)


# ------------------------------------------------------------ as bytes

PATH_PREFIX = "/v1/store/"
PROTOCOL_HEADER = "x-ajet-protocol"
BATCH_PATH = PATH_PREFIX + "batch"
_REFUSED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, NotImplementedError, RecursionError)

_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value)).encode
_encode_json = msgspec.json.Encoder(enc_hook=lambda value: _plain(value)).encode
_DECODERS: dict[type[StoreRequest[Any]], Any] = {
    operation.request: msgspec.msgpack.Decoder(operation.request).decode for operation in OPERATIONS
}
_NOT_FINITE = re.compile(b"\xcb[\x7f\xff]")
"""How NaN, infinities and the very largest numbers begin in msgpack. Other bytes may look so, too."""


def checked_copy(request: StoreRequest[T]) -> StoreRequest[T]:
    """Return the request as a store would get it over HTTP. Raises a StoreError if it isn't valid."""
    kind = type(request)
    try:
        data = _encode(request)
        copy: StoreRequest[T] = _DECODERS[kind](data)
    except _REFUSED as error:
        raise StoreError(f"{kind.__name__}: {error}") from None
    _check_finite(data, kind.__name__)
    return copy


def as_json(request: StoreRequest[Any]) -> bytes:
    """Encode a request for HTTP. The server checks the rest."""
    kind = type(request)
    try:
        _check_finite(_encode(request), kind.__name__)
        return _encode_json(request)
    except _REFUSED as error:
        raise StoreError(f"{kind.__name__}: {error}") from None


def _check_finite(data: bytes, where: str) -> None:
    if _NOT_FINITE.search(data):
        _refuse_not_finite(msgspec.msgpack.decode(data), where)


def _refuse_not_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{where} is {value}: a store keeps finite numbers only")
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_not_finite(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_not_finite(inner, f"{where}[{index}]")


def _plain(value: Any) -> Any:
    """Turn values of numpy and torch, and pydantic models, into data."""
    for method in ("tolist", "model_dump"):
        if callable(found := getattr(value, method, None)):
            return found()
    raise NotImplementedError(f"{type(value).__name__} is not data that a store can keep")


class ErrorDetail(msgspec.Struct):
    code: str
    message: str


class ErrorAnswer(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


class BatchItem(msgspec.Struct):
    """One of several small requests that come together."""

    request: str
    """Its path below `/v1/store/`."""
    body: msgspec.Raw


class BatchOutcome(msgspec.Struct, omit_defaults=True):
    """What became of it: an answer, or an error."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorDetail | None = None


@cache
def document() -> bytes:
    """The OpenAPI document, as JSON."""
    types: list[Any] = [ErrorAnswer, ProtocolInfo]
    for operation in OPERATIONS:
        types += [operation.request, operation.answer]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    error, info, *pairs = schemas
    paths: dict[str, Any] = {
        "/healthz": {"get": _description("Whether the server is up.", None, {"type": "object"}, error)},
        "/v1/store": {"get": _description("The server's version, and what the key may do.", None, info, error)},
    }
    item = {"properties": {"request": {"type": "string"}, "body": {}}, "required": ["request", "body"]}
    outcome = {"properties": {"answer": {}, "error": {"$ref": "#/components/schemas/ErrorDetail"}}}
    items, outcomes = ({"type": "array", "items": {"type": "object", **one}} for one in (item, outcome))
    together = _description("Several small requests, each with its own outcome.", items, outcomes, error)
    paths[BATCH_PATH] = {"post": together}
    for index, operation in enumerate(OPERATIONS):
        request, answer = pairs[2 * index : 2 * index + 2]
        paths[PATH_PREFIX + operation.path] = {
            "post": {
                "operationId": operation.request.__name__,
                "description": f"For keys of: {', '.join(sorted(operation.roles))}.",
                **_description(operation.summary, request, answer, error),
            }
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "AgentJet rollout store", "version": str(PROTOCOL)},
            "security": [{"key": []}],
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _description(summary: str, request: Any, answer: Any, error: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "Refused.", "content": {"application/json": {"schema": error}}},
        },
    }
    if request is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return described
