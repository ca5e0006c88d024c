"""`Span`: an event within an attempt, in OpenTelemetry's terms. Stores and episodes both use it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Id = Annotated[str, Meta(pattern=r"^[!-~]{1,200}(?![\s\S])")]
"""1 to 200 printable ASCII characters without spaces."""
KnownId = Annotated[str, Meta(min_length=1, max_length=200)]
"""The id of something that exists already. Its form isn't checked, as the look-up finds out whether it exists."""
JsonObject = dict[str, Any]


class SpanStatus(Struct, frozen=True, kw_only=True, gc=False):
    """Whether the operation that a span describes succeeded."""

    status_code: Literal["UNSET", "OK", "ERROR"] = "UNSET"
    description: str | None = None


class Span(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What happened in an attempt. Ordered by `sequence_id`, never by clock.

    In an episode's record, `attempt_id` is the episode's id, and `rollout_id` the id of its first attempt."""

    rollout_id: KnownId
    attempt_id: KnownId
    span_id: Id
    name: str
    trace_id: str = ""
    parent_id: str | None = None
    sequence_id: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """0: the store (or the episode) gives it the rollout's next number."""
    status: SpanStatus = SpanStatus()
    attributes: JsonObject = field(default_factory=dict)
    events: tuple[JsonObject, ...] = ()
    links: tuple[JsonObject, ...] = ()
    start_time: float | None = None
    """Unix time, by the clock of the machine that made the span."""
    end_time: float | None = None
    resource: JsonObject = field(default_factory=dict)
