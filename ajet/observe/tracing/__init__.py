"""Spans: what user code records about its episode, how it travels, and what can be made of it."""

from typing import TYPE_CHECKING

from ajet.observe.tracing.attributes import (
    ANNOTATION,
    CALL,
    EXCEPTION,
    MESSAGE,
    NOT_COUNTED,
    OBJECT,
    OPERATION,
    REWARD,
    bounded,
    by_our_clock,
    call_of,
    find_final_reward,
    find_reward_spans,
    flat,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    message_attributes,
    nested,
    plain,
    reward_of,
    with_valid_reward,
)
from ajet.observe.tracing.emitters import (
    Operation,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
)
from ajet.observe.tracing.recording import OUTSIDE, NoRecordingError, Recording, current_place, record_spans
from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.observe.tracing.adapters import (
        Triplet,
        episode_spans,
        llm_calls,
        read_call,
        to_messages,
        to_tasks,
        to_triplets,
    )

__all__ = [
    "ANNOTATION",
    "CALL",
    "EXCEPTION",
    "MESSAGE",
    "NOT_COUNTED",
    "OBJECT",
    "OPERATION",
    "OUTSIDE",
    "REWARD",
    "NoRecordingError",
    "Operation",
    "Recording",
    "Triplet",
    "bounded",
    "by_our_clock",
    "call_of",
    "current_place",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "episode_spans",
    "find_final_reward",
    "find_reward_spans",
    "flat",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_calls",
    "message_attributes",
    "nested",
    "operation",
    "plain",
    "read_call",
    "record_spans",
    "reward_of",
    "to_messages",
    "to_tasks",
    "to_triplets",
    "with_valid_reward",
]

# workflows that only emit spans need none of these
_FROM_ADAPTERS = ("Triplet", "episode_spans", "llm_calls", "read_call", "to_messages", "to_tasks", "to_triplets")
__getattr__ = lazily(__name__, dict.fromkeys(_FROM_ADAPTERS, "adapters"))
