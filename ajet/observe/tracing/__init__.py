"""Spans: what user code tells about its episode, how it travels, and what can be made of it."""

from ajet.observe.tracing.attributes import (
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
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

__all__ = [
    "NoRecordingError",
    "Recording",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "record_spans",
]
