"""What a store keeps, as frozen data: rollouts, their attempts and spans, versioned resources, workers.

The garbage collector skips records that come by the thousand (`gc=False`): they hold JSON, which has no cycles.

Times are seconds since 1970 by the store's clock. `input`, `metadata`, `result` and attributes are any JSON value.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct, field

from ajet.schema.span import Id, JsonObject, KnownId
from ajet.schema.span import Span as Span

T = TypeVar("T")

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Mode = Literal["train", "val", "test"]
Json = Any


class RolloutStatus(StrEnum):
    """The status of a rollout. The last three are final."""

    QUEUING = "queuing"
    PREPARING = "preparing"
    """Claimed, without a sign of life yet."""
    RUNNING = "running"
    REQUEUING = "requeuing"
    """Waiting to be attempted again."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptStatus(StrEnum):
    """The status of an attempt."""

    PREPARING = "preparing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    """It took longer than `timeout_seconds`."""
    UNRESPONSIVE = "unresponsive"
    """It sent no sign of life for `unresponsive_seconds`."""
    CANCELLED = "cancelled"


class WorkerStatus(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"
    """Its last attempt ran into a timeout."""


RetryCause = Literal["failed", "timeout", "unresponsive"]


class RolloutConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long an attempt may take, and when a rollout is attempted again."""

    timeout_seconds: Seconds | None = None
    """The timeout of an attempt."""
    unresponsive_seconds: Seconds | None = None
    """How long a runner may be silent (no heartbeat and no span). A dead runner costs this much time."""
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 1
    retry_condition: tuple[RetryCause, ...] = ()
    """Retry after an attempt that ended so."""


class Rollout(Struct, frozen=True, kw_only=True, gc=False):
    """One task to be executed."""

    rollout_id: KnownId
    input: Json
    start_time: float
    end_time: float | None = None
    mode: Mode | None = None
    resources_id: Id | None = None
    status: RolloutStatus = RolloutStatus.QUEUING
    config: RolloutConfig = RolloutConfig()
    metadata: JsonObject = field(default_factory=dict)


class Attempt(Struct, frozen=True, kw_only=True, gc=False):
    """One try at a rollout."""

    rollout_id: KnownId
    attempt_id: KnownId
    sequence_id: int
    """From 1. Only the attempt with the highest one can change its rollout."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = AttemptStatus.PREPARING
    worker_id: Id | None = None
    last_heartbeat_time: float | None = None
    metadata: JsonObject = field(default_factory=dict)
    result: Json = None
    """What the runner reported at the end."""


class AttemptedRollout(Struct, frozen=True, kw_only=True, gc=False):
    """A rollout and its latest attempt."""

    rollout: Rollout
    attempt: Attempt | None = None


class Resources(Struct, frozen=True, kw_only=True):
    """One version of what is tuned, by name: models, prompt templates."""

    resources_id: Id
    version: int
    create_time: float
    update_time: float
    resources: JsonObject


class Worker(Struct, frozen=True, kw_only=True):
    """One slot of a runner."""

    worker_id: Id
    status: WorkerStatus = WorkerStatus.IDLE
    heartbeat_stats: JsonObject = field(default_factory=dict)
    last_heartbeat_time: float | None = None
    last_claim_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: Id | None = None
    current_attempt_id: Id | None = None


class Page(Struct, Generic[T], frozen=True, kw_only=True):
    """One page of the records that a query matches."""

    items: list[T]
    total: int
    """How many match."""


class Statistics(Struct, frozen=True, kw_only=True):
    """How much a store holds."""

    rollouts: dict[str, int]
    """By status."""
    workers: dict[str, int]
    """By status."""
    stored_bytes: int
    """The size of inputs, results and spans together."""


class ProtocolInfo(Struct, frozen=True, kw_only=True):
    """What a server says about itself, and about the caller's key."""

    protocol: int
    ajet: str
    schema: int
    roles: list[str]
    """What the key is allowed to do."""
