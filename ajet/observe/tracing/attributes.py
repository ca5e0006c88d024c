"""Attributes of spans: their names, values as JSON, and the rewards and messages that readers find in them.

`plain` turns any Python value into JSON, `flat` nested mappings into dotted names, `bounded` limits a span's size.
`by_our_clock` corrects the times of another machine's spans, as far as its clock is known.
"""

from __future__ import annotations

import json
import logging
import math
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ajet.schema.chat import bare_call_id
from ajet.schema.errors import RewardError
from ajet.schema.printable import encodable
from ajet.schema.span import Span
from ajet.schema.task import finite_reward

log = logging.getLogger(__name__)

PREFIX = "agentlightning."
ANNOTATION = PREFIX + "annotation"
MESSAGE = PREFIX + "message"
OBJECT = PREFIX + "object"
EXCEPTION = PREFIX + "exception"
OPERATION = PREFIX + "operation"
REWARD = PREFIX + "reward"

REWARD_NAME = PREFIX + "reward.{}.name"
"""Dimension 0 is the primary one."""
REWARD_VALUE = PREFIX + "reward.{}.value"
REWARD_VALUES = re.compile(r"agentlightning\.reward\.\d+\.value")
PRIMARY = "primary"
"""The name of the only dimension of a reward that is a number."""
MESSAGE_BODY = PREFIX + "message.body"
OBJECT_TYPE = PREFIX + "object.type"
OBJECT_LITERAL = PREFIX + "object.literal"
OBJECT_JSON = PREFIX + "object.json"
OPERATION_NAME = PREFIX + "operation.name"
OPERATION_INPUT = PREFIX + "operation.input"
OPERATION_OUTPUT = PREFIX + "operation.output"

LINK_KEY = PREFIX + "link.{}.key_match"
LINK_VALUE = PREFIX + "link.{}.value_match"
"""A span is about another one: the one whose attribute of that name has that value."""
RESPONSE_ID = "gen_ai.response.id"

CALL = "openai.chat.completion"
"""Adapters of agent-lightning look for this name."""

ROLLOUT_ID = PREFIX + "rollout_id"
ATTEMPT_ID = PREFIX + "attempt_id"

WORTH = "ajet.reward"
"""What an episode, or one of its calls, was worth in training."""
NOT_COUNTED = "ajet.reward.not_counted"
"""On a reward that came over HTTP without the control key, or not from `emit_reward`: why it has no effect."""
MAX_TEXT = 16_384
"""Characters of one text; the rest is cut, and the cut is said."""
MAX_ATTRIBUTES = 256
"""The limit for a span, and for each of its events and links."""
MAX_EVENTS = 64
"""Events of one span, and links."""
MAX_DEPTH = 20
CUT = "ajet.attributes_left_out"
"""How many attributes of a span were left out."""


# ---------------------------------------------------------------- values as JSON


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON. Objects that JSON doesn't know become their `repr`, long texts are cut."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, int):
        if value.bit_length() < 64:
            return int(value)
        return str(value) if value.bit_length() < 10_000 else "a huge number"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {_text(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    for method in ("model_dump", "tolist"):  # pydantic; numpy and torch
        if callable(found := getattr(value, method, None)) and not isinstance(value, type):
            return plain(found(), depth + 1)
    return _text(_repr(value))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings under dotted names; lists of mappings or lists under their index, others as they are."""
    return dict(_flat(plain(values), prefix)) if values else {}


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `flat`, for the names below `prefix`. Numbers stay names: a list comes back as a mapping."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not name.startswith(prefix):
            continue
        *path, last = name[len(prefix) :].strip(".").split(".")
        place = found
        for part in path:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {"": inner}
            place = inner
        place[last] = value
    return found


def bounded(span: Span) -> Span:
    """Cut a span to its limits, with JSON values throughout."""
    return replace(
        span,
        name=span.name[:500],
        attributes=_few(span.attributes),
        events=tuple(_few(event) for event in span.events[:MAX_EVENTS]),
        links=tuple(_few(link) for link in span.links[:MAX_EVENTS]),
        resource=_few(span.resource),
    )


def _few(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {_text(str(name))[:500]: plain(value) for name, value in list(values.items())[:MAX_ATTRIBUTES]}
    return kept if len(values) <= MAX_ATTRIBUTES else {**kept, CUT: len(values) - MAX_ATTRIBUTES}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}.{index}" if name else str(index))
    else:
        yield name, value


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"
    return encodable(text)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the user's own class: it must not end what it is used in
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def message_attributes(prefix: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as attributes, which `llm_calls` reads."""
    content = message.get("content")
    values = {f"{prefix}.role": message.get("role", "assistant")}
    values[f"{prefix}.content"] = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if message.get("tool_calls"):
        values[f"{prefix}.tool_calls"] = json.dumps(message["tool_calls"], ensure_ascii=False)
    if message.get("tool_call_id"):
        values[f"{prefix}.tool_call_id"] = message["tool_call_id"]
    return values


# ---------------------------------------------------------------- which agent a span belongs to

AGENT_NAMES = ("agent.name", "gen_ai.agent.name", "recipient_agent_type", "executor.id")
"""Attributes that hold the name whatever the span is: ours and OpenTelemetry's, and those of AutoGen and of Microsoft's
Agent Framework."""
AGENT_NAMES_BY_KIND = (
    ("agentops.span.kind", "operation.name"),
    ("traceloop.span.kind", "traceloop.entity.name"),
    ("agentlightning.operation.input.type", "agentlightning.operation.input.name"),
)
"""Attributes that say `agent`, and those that then hold the name."""
_OPENINFERENCE_KIND = "openinference.span.kind"
_LANGCHAIN = ("langchain.chain.type", "lc_name")


def agent_of(span: Span) -> str:
    """The agent that a span names itself, or ``""``."""
    values = span.attributes
    for name in AGENT_NAMES:
        if isinstance(value := values.get(name), str) and value:
            return value
    for kind, name in AGENT_NAMES_BY_KIND:
        if str(values.get(kind)).lower() == "agent" and isinstance(value := values.get(name), str):
            return value
    if values.get(_OPENINFERENCE_KIND) == "AGENT":
        return span.name
    for name in _LANGCHAIN:
        if span.name.lower().startswith("langchain.chain") and isinstance(value := values.get(name), str):
            return value
    return ""


def agents_around(span: Span, by_id: Mapping[str, Span]) -> list[str]:
    """The agents of a span and of those around it, the innermost first."""
    found: list[str] = []
    seen: set[str] = set()
    here: Span | None = span
    while here is not None and here.span_id not in seen:
        seen.add(here.span_id)
        if name := agent_of(here):
            found.append(name)
        here = by_id.get(here.parent_id or "")
    return found


# ---------------------------------------------------------------- clocks of other machines

SENT_AT = "ajet.sent_at"
"""An attribute of a span's resource: when it was sent, by the sender's clock. Only our own senders set it."""
OFFSET = "ajet.clock_offset"
"""An attribute of a span's resource: the seconds that were added to its times."""
NOTICED_S = 1.0
"""Smaller differences may come from the network."""


def by_our_clock(spans: Sequence[Span], now: float) -> list[Span]:
    """Correct the times of spans that have just arrived. If the sender doesn't say when it sent them, only a clock that
    is ahead can be noticed."""
    offsets: dict[str, float] = {}
    for span in spans:
        clock = clock_of(span)
        said = span.resource.get(SENT_AT)
        if isinstance(said, int | float) and not isinstance(said, bool) and math.isfinite(said):
            offsets[clock] = now - said
        elif span.end_time is not None and now < span.end_time:
            offsets[clock] = min(offsets.get(clock, 0.0), now - span.end_time)
    return [_shifted(span, offsets.get(clock_of(span), 0.0)) for span in spans]


def clock_of(span: Span) -> str:
    """Identify the clock of a span: spans of one resource share one."""
    return repr(sorted((name, value) for name, value in span.resource.items() if name not in (SENT_AT, OFFSET)))


def _shifted(span: Span, offset: float) -> Span:
    resource = {name: value for name, value in span.resource.items() if name != SENT_AT}
    if abs(offset) < NOTICED_S or abs(offset) > 1e10:
        return replace(span, resource=resource)
    return replace(
        span,
        start_time=None if span.start_time is None else span.start_time + offset,
        end_time=None if span.end_time is None else span.end_time + offset,
        events=tuple(_events(span.events, offset)),
        resource={**resource, OFFSET: offset},
    )


def _events(events: Iterable[dict[str, object]], offset: float) -> Iterable[dict[str, object]]:
    for event in events:
        time = event.get("time")
        yield {**event, "time": time + offset} if isinstance(time, int | float) and time else event


# ---------------------------------------------------------------- rewards and emitted values

_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


class EmittedReward(NamedTuple):
    """A reward in a span."""

    value: float
    """The value of the primary dimension."""
    dimensions: dict[str, float]
    """All of them by name, the primary one first."""


def reward_of(span: Span) -> EmittedReward | None:
    """Return the reward that a span holds, or None if it holds none that counts."""
    if NOT_COUNTED in span.attributes:
        return None
    dimensions = _dimensions(span)
    if not dimensions:
        return None
    return EmittedReward(next(iter(dimensions.values())), dimensions)


def with_valid_reward(span: Span) -> Span:
    """Return a span as it is kept: if a reward's value is no number, it says that it doesn't count, and why."""
    for name, value in span.attributes.items():
        if type(value) is not float and REWARD_VALUES.fullmatch(name):
            try:
                finite_reward(value, f"span {span.span_id}: the attribute {name!r}")
            except RewardError as error:
                log.warning("%s", error)
                return replace(span, attributes={**span.attributes, NOT_COUNTED: str(error)})
    return span


def call_of(span: Span) -> str | None:
    """Return the id of the response that a reward is for, or None if it isn't for a single call."""
    for index in range(len(span.attributes)):
        key = span.attributes.get(LINK_KEY.format(index))
        if key is None:
            break
        value = span.attributes.get(LINK_VALUE.format(index))
        if key == RESPONSE_ID and isinstance(value, str):
            return bare_call_id(value)
    return None


def get_reward_value(span: Span) -> float | None:
    """The primary dimension of a span's reward."""
    reward = reward_of(span)
    return None if reward is None else reward.value


def get_rewards_from_span(span: Span) -> dict[str, float]:
    """All dimensions of a span's reward by name, the primary one first."""
    reward = reward_of(span)
    return {} if reward is None else reward.dimensions


def is_reward_span(span: Span) -> bool:
    """Whether a span holds a reward."""
    return reward_of(span) is not None


def find_reward_spans(spans: Sequence[Span]) -> list[Span]:
    """Find the spans that hold a reward, in their order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """The last reward that is not a single call's: the one that counts for the episode."""
    rewards = (get_reward_value(span) for span in reversed(spans) if call_of(span) is None)
    return next((value for value in rewards if value is not None), None)


def get_message_value(span: Span) -> str | None:
    """What `emit_message` was given."""
    body = span.attributes.get(MESSAGE_BODY)
    return body if isinstance(body, str) else None


def get_object_value(span: Span) -> Any:
    """What `emit_object` was given, if it was a text, number, bytes or JSON; of other objects the text that stands for
    them."""
    attributes = span.attributes
    if isinstance(text := attributes.get(OBJECT_JSON), str):
        return json.loads(text)
    literal = attributes.get(OBJECT_LITERAL)
    match attributes.get(OBJECT_TYPE):
        case "bytes":
            return b64decode(str(literal))
        case "bool":
            return str(literal) == "True"
        case "int":
            return int(str(literal))
        case "float":
            return float(str(literal))
        case "NoneType":
            return None
    return literal


def _dimensions(span: Span) -> dict[str, float]:
    attributes = span.attributes
    found: dict[str, float] = {}
    for index in range(len(attributes)):
        value = _number(attributes.get(REWARD_VALUE.format(index)))
        if value is None:
            break
        found[str(attributes.get(REWARD_NAME.format(index), PRIMARY))] = value
    if found:
        return found
    for name in _AGENTOPS_OUTPUTS:
        if (value := _agentops_reward(attributes.get(name))) is not None:
            return {PRIMARY: value}
    if span.name in (ANNOTATION, REWARD) and (value := _number(attributes.get("reward"))) is not None:
        return {PRIMARY: value}
    return {}


def _agentops_reward(text: Any) -> float | None:
    """`{"type": "reward", "value": 1.0}` as JSON."""
    if not isinstance(text, str) or '"reward"' not in text or len(text) > 1000:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _number(value.get("value")) if isinstance(value, dict) and value.get("type") == "reward" else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None
