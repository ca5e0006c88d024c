"""Spans: what user code records about its episode, how it travels, and what can be made of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ajet.observe.tracing.attributes import (
    NOT_COUNTED,
    bounded,
    by_our_clock,
    call_of,
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward_of,
)
from ajet.observe.tracing.emitters import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
)
from ajet.observe.tracing.recording import NoRecordingError, Recording, record_spans

if TYPE_CHECKING:
    from ajet.observe.tracing.adapters import Triplet, llm_calls, read_call, to_messages, to_tasks, to_triplets
    from ajet.observe.tracing.sender import SpanSender, episode_spans

__all__ = [
    "NOT_COUNTED",
    "NoRecordingError",
    "Recording",
    "SpanSender",
    "Triplet",
    "bounded",
    "by_our_clock",
    "call_of",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "episode_spans",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_calls",
    "operation",
    "read_call",
    "record_spans",
    "reward_of",
    "to_messages",
    "to_tasks",
    "to_triplets",
]

# workflows that only emit spans need neither
_ADAPTERS = ("Triplet", "llm_calls", "read_call", "to_messages", "to_tasks", "to_triplets")
_SENDER = ("SpanSender", "episode_spans")


def __getattr__(name: str) -> Any:
    if name not in (*_ADAPTERS, *_SENDER):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'adapters' if name in _ADAPTERS else 'sender'}"), name)
