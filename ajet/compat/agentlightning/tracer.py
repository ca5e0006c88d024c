"""Spans: tracers record those of an attempt, and adapters make something of them.

The names of spans and attributes, and what reads and writes them, are Agent-lightning's `semconv` and `utils.otel`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from enum import Enum
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from msgspec.structs import replace

from ajet.compat.agentlightning.store import LightningStore
from ajet.observe.tracing import (
    ANNOTATION,
    CALL,
    EXCEPTION,
    MESSAGE,
    OBJECT,
    OPERATION,
    REWARD,
    Operation,
    Recording,
    Triplet,
    current_place,
    flat,
    message_attributes,
    nested,
    plain,
    record_spans,
    to_messages,
    to_triplets,
)
from ajet.observe.tracing import get_rewards_from_span as dimensions_of
from ajet.schema.errors import UserError
from ajet.schema.span import Span

log = logging.getLogger(__name__)

AGL_ANNOTATION = ANNOTATION
AGL_EXCEPTION = EXCEPTION
AGL_MESSAGE = MESSAGE
AGL_OBJECT = OBJECT
AGL_OPERATION = OPERATION
AGL_REWARD = REWARD


class LightningResourceAttributes(Enum):
    """Attributes of a span's resource."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"


class LightningSpanAttributes(Enum):
    """Attributes of spans, or the beginnings of their names."""

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


class LinkPydanticModel(NamedTuple):
    """A span is about those whose attribute of this name has this value."""

    key_match: str
    value_match: str


class RewardPydanticModel(NamedTuple):
    """One dimension of a reward."""

    name: str
    value: float


def get_rewards_from_span(span: Span) -> list[RewardPydanticModel]:
    """All dimensions of a span's reward, the primary one first."""
    return [RewardPydanticModel(*one) for one in dimensions_of(span).items()]


def make_tag_attributes(tags: Iterable[str]) -> dict[str, Any]:
    return {f"{LightningSpanAttributes.TAG.value}.{index}": tag for index, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    return [str(tag) for tag in filter_and_unflatten_attributes(attributes, LightningSpanAttributes.TAG.value)]


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Links by the attribute that has to match. Raises ValueError if a value is no text."""
    if wrong := [key for key, value in links.items() if not isinstance(value, str)]:
        raise ValueError(f"the link {wrong[0]!r} must be a text, not {type(links[wrong[0]]).__name__}")
    listed = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return flat({LightningSpanAttributes.LINK.value: listed})


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    found = filter_and_unflatten_attributes(attributes, LightningSpanAttributes.LINK.value)
    return [LinkPydanticModel(**one) for one in found]


def query_linked_spans(spans: Sequence[Span], links: Sequence[LinkPydanticModel]) -> list[Span]:
    """Return those that match every link."""

    def value(span: Span, key: str) -> Any:
        return getattr(span, key) if key in ("trace_id", "span_id") else span.attributes.get(key)

    return [span for span in spans if all(value(span, link.key_match) == link.value_match for link in links)]


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return those named `prefix`, or below it."""
    return {name: value for name, value in attributes.items() if f"{name}.".startswith(f"{prefix}.")}


def filter_and_unflatten_attributes(attributes: Mapping[str, Any], prefix: str) -> Any:
    """What is below `prefix`, nested. Raises ValueError if `prefix` itself has a value."""
    found = filter_attributes(attributes, prefix)
    if prefix in found:
        raise ValueError(f"the attribute {prefix!r} has a value of its own: nothing is below it")
    return unflatten_attributes({name[len(prefix) + 1 :]: value for name, value in found.items()})


def flatten_attributes(nested_data: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Nested mappings and lists of mappings under dotted names; lists of plain values stay lists."""
    return flat(
        nested_data
        if isinstance(nested_data, Mapping)
        else {str(index): value for index, value in enumerate(nested_data)}
    )


def unflatten_attributes(flat_data: Mapping[str, Any]) -> Any:
    """The inverse: names 0, 1, … make a list."""
    return _lists(nested(flat_data))


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _lists(item) for name, item in value.items()}
    numbers = [str(index) for index in range(len(inner))]
    return [inner[number] for number in numbers] if inner and set(inner) == set(numbers) else inner


def get_tracer_provider(inspect: bool = True) -> Any:
    """OpenTelemetry's provider, for spans of your own that don't go to a store. Needs `opentelemetry-api`."""
    provider = import_module("opentelemetry.trace").get_tracer_provider()
    if inspect:
        log.debug("OpenTelemetry's provider: %r. Emitted spans go to the tracer's store without it", provider)
    return provider


class Tracer:
    """Records what is emitted within `trace_context`. It has no options."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._store: LightningStore | None = None

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Iterator[Tracer]:
        """Within this, spans go to this store."""
        self._store = store
        try:
            yield self
        finally:
            self._store = None

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sink: Callable[[Span], None] | None = None,
    ) -> AsyncIterator[Tracer]:
        """What is emitted within belongs to this attempt; both ids or neither. `sink` gets each span as it ends; a
        store gets them all at the end."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context takes rollout_id and attempt_id together")
        if store is not None and rollout_id is None:
            raise ValueError("trace_context: spans for a store need rollout_id and attempt_id")
        store = store or (self._store if rollout_id is not None else None)
        with record_spans(sink, attempt_id=attempt_id or "local", rollout_id=rollout_id or "") as spans:
            self._spans = spans
            try:
                with self._around(name):
                    yield self
            finally:
                if store is not None:
                    resource = {
                        LightningResourceAttributes.ROLLOUT_ID.value: rollout_id,
                        LightningResourceAttributes.ATTEMPT_ID.value: attempt_id,
                    }
                    await store.add_many_spans([replace(span, resource=resource) for span in spans])

    def start_as_current_span(self, name: str, attributes: Mapping[str, Any] | None = None) -> Operation:
        """A span around code. Nothing is recorded outside of `trace_context`."""
        return Operation(name, attributes or {}, span_name=name)

    def get_last_trace(self) -> list[Span]:
        """The spans of the latest context."""
        return list(self._spans)

    def _around(self, name: str | None) -> Any:
        return nullcontext()


class AgentOpsTracer(Tracer):
    """Also records the calls that `openai`'s clients make, and the context itself if it has a name."""

    @contextmanager
    def _around(self, name: str | None) -> Iterator[None]:
        place = current_place()
        assert place is not None and place.recording is not None
        _recorded.add(place.recording)
        _record_openai()
        session = {"agentops.span.kind": "session"}
        with nullcontext() if name is None else Operation(name, session, span_name=f"{name}.session"):
            yield


OtelTracer = Tracer
DummyTracer = Tracer


# ---------------------------------------------------------------- model calls outside of episodes

_recorded: WeakSet[Recording] = WeakSet()
"""Recordings that want model calls. In an episode the gateway records them."""


@functools.cache
def _record_openai() -> None:
    """From now on, chat completions are recorded where a recording wants them."""
    from openai.resources.chat.completions import AsyncCompletions, Completions

    for kind in (Completions, AsyncCompletions):
        kind.create = _recording(kind.create)  # type: ignore[method-assign]


def _recording(create: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(inspect.unwrap(create)):

        @functools.wraps(create)
        async def call_async(*args: Any, **asked: Any) -> Any:
            with _span_of(asked) as add:
                reply = await create(*args, **asked)
                add(reply)
                return reply

        return call_async

    @functools.wraps(create)
    def call(*args: Any, **asked: Any) -> Any:
        with _span_of(asked) as add:
            reply = create(*args, **asked)
            add(reply)
            return reply

    return call


@contextmanager
def _span_of(asked: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
    """A span around a call, where a recording wants it, and what adds the reply to it. A stream's reply is its caller's
    alone."""
    place = current_place()
    if place is None or place.recording not in _recorded or asked.get("stream"):
        yield lambda reply: None
        return
    with Operation("chat", _request(asked), encloses=False, span_name=CALL) as span:
        yield functools.partial(_add_reply, span)


def _request(asked: dict[str, Any]) -> dict[str, Any]:
    """What is asked, as attributes. Messages that can be read only once become a list."""
    asked["messages"] = list(asked.get("messages") or ())
    values = {
        "gen_ai.request.type": "chat",
        "gen_ai.system": "OpenAI",
        "gen_ai.request.model": str(asked.get("model")),
        "gen_ai.request.streaming": False,
    }
    if tools := asked.get("tools"):
        values["gen_ai.request.tools"] = json.dumps(plain(tools))
    for index, message in enumerate(asked["messages"]):
        values |= message_attributes(f"gen_ai.prompt.{index}", plain(message))
    return values


def _add_reply(span: Operation, reply: Any) -> None:
    """`reply` is whatever the server sent; token ids are vLLM's."""
    if not hasattr(reply, "model_dump") and hasattr(reply, "parse") and not inspect.iscoroutinefunction(reply.parse):
        reply = reply.parse()  # of `with_raw_response`, which LangChain uses
    found = reply.model_dump() if hasattr(reply, "model_dump") else {}
    span.set_attribute("gen_ai.response.id", found.get("id"))
    span.set_attribute("gen_ai.response.model", found.get("model"))
    for choice in (found.get("choices") or ())[:1]:
        for name, value in message_attributes("gen_ai.completion.0", choice.get("message") or {}).items():
            span.set_attribute(name, value)
        if choice.get("token_ids"):
            span.set_attribute("response_token_ids", choice["token_ids"])
    if found.get("prompt_token_ids"):
        span.set_attribute("prompt_token_ids", found["prompt_token_ids"])


T = TypeVar("T")
FIRST_OCCURRENCE = "first_occurrence"
"""How rewards find their calls: in the order of time, each goes to the latest call before it that has none."""


class TraceAdapter(Generic[T]):
    """Override `adapt`. An adapter can be called like a function."""

    def adapt(self, spans: Sequence[Span]) -> T:
        raise UserError(f"{type(self).__name__} does not override `adapt`")

    def __call__(self, spans: Sequence[Span]) -> T:
        return self.adapt(spans)


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Prompt, response and reward of each model call, of the agents whose name matches `agent_match`."""

    def __init__(self, *, agent_match: str | None = None, reward_match: str = FIRST_OCCURRENCE) -> None:
        if str(reward_match).lower().rpartition(".")[2] != FIRST_OCCURRENCE:
            raise UserError(f"reward_match={reward_match!r}: rewards are matched by {FIRST_OCCURRENCE!r} alone")
        self.agent_match = agent_match

    def adapt(self, spans: Sequence[Span]) -> list[Triplet]:
        return to_triplets(spans, agent=self.agent_match)


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """A conversation (`messages`, `tools`) per model call, to fine-tune on."""

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        return to_messages(spans)


LlmProxyTraceToTriplet = TracerTraceToTriplet
"""Model calls come from the gateway or from spans: both are read alike."""
