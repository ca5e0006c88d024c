"""Reading what emitters wrote: rewards, messages and objects in spans; also older ways of writing a reward."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, NamedTuple

from ajet.observe.tracing import attributes as names
from ajet.schema.chat import bare_call_id
from ajet.schema.span import Span

_LEGACY = ("agentops.task.output", "agentops.entity.output")


class Reward(NamedTuple):
    """A reward in a span."""

    value: float
    """Of the primary dimension."""
    dimensions: dict[str, float]
    """All of them by name, the primary one first."""


def reward_of(span: Span) -> Reward | None:
    """The reward that a span holds. None: it holds none, or none that counts."""
    if names.NOT_COUNTED in span.attributes:
        return None
    dimensions = _dimensions(span)
    if not dimensions:
        return None
    return Reward(next(iter(dimensions.values())), dimensions)


def call_of(span: Span) -> str | None:
    """The call that a reward is for, by its response's id. None: it isn't for a single call."""
    for index in range(len(span.attributes)):
        key = span.attributes.get(names.LINK_KEY.format(index))
        if key is None:
            break
        value = span.attributes.get(names.LINK_VALUE.format(index))
        if key == names.RESPONSE_ID and isinstance(value, str):
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
    """Those that hold a reward, in their order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """The last reward that is not a single call's: the one that counts for the episode."""
    rewards = (get_reward_value(span) for span in reversed(spans) if call_of(span) is None)
    return next((value for value in rewards if value is not None), None)


def get_message_value(span: Span) -> str | None:
    """What `emit_message` was given."""
    body = span.attributes.get(names.MESSAGE_BODY)
    return body if isinstance(body, str) else None


def get_object_value(span: Span) -> Any:
    """What `emit_object` was given, if it was a text, number, bytes or JSON; of other objects the text that stands for
    them."""
    attributes = span.attributes
    if isinstance(text := attributes.get(names.OBJECT_JSON), str):
        return json.loads(text)
    literal = attributes.get(names.OBJECT_LITERAL)
    match attributes.get(names.OBJECT_TYPE):
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
        value = _number(attributes.get(names.REWARD_VALUE.format(index)))
        if value is None:
            break
        found[str(attributes.get(names.REWARD_NAME.format(index), names.PRIMARY))] = value
    if found:
        return found
    for name in _LEGACY:
        if (value := _legacy(attributes.get(name))) is not None:
            return {names.PRIMARY: value}
    if span.name in (names.ANNOTATION, names.REWARD) and (value := _number(attributes.get("reward"))) is not None:
        return {names.PRIMARY: value}
    return {}


def _legacy(text: Any) -> float | None:
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
