"""Agent-lightning's `semconv` and `utils.otel`: the names of spans and attributes, and what reads and writes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

from ajet.observe.tracing import ANNOTATION, EXCEPTION, MESSAGE, OBJECT, OPERATION, REWARD, flat, nested
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
    """Those that match every link."""

    def value(span: Span, key: str) -> Any:
        return getattr(span, key) if key in ("trace_id", "span_id") else span.attributes.get(key)

    return [span for span in spans if all(value(span, link.key_match) == link.value_match for link in links)]


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those named `prefix`, or below it."""
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
