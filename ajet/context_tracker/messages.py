"""Normalises messages, computes the key by which two count as the same, and the shape of a whole conversation.

`plain_message` validates a request's message and converts it to the form that templates receive: content is text, and
tool calls hold their arguments by value. `message_key` decides whether a prompt *extends* a call: tool calls by value,
null equal to "", text parts joined, consistent ids and a reply's surrounding white space ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ajet.schema.chat import Message
from ajet.schema.errors import InvalidRequestError, UnsupportedContentError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MAX_ARGUMENT_DEPTH = 64
INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)

MessageKey = tuple[Hashable, ...]


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of text parts.

    As with DashScope, a part may lack its type, and its text may be null.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where}.content must be a string, null or a list of parts, not {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = "text" if kind is None else TEXT_PARTS.get(str(kind))
        if field is None or not isinstance(part, Mapping) or not isinstance(part.get(field, 0), str | None):
            raise UnsupportedContentError(
                f"{where}.content[{index}] is {reprlib.repr(part)}: this model takes only text, in parts of type 'text'"
            )
        if part[field] is not None:
            texts.append(part[field])
    return "\n".join(texts)


def plain_message(raw: Any, where: str) -> Message:
    """The message in the form that templates receive. Raises InvalidRequestError that names the place."""
    if type(raw) is not dict and not isinstance(raw, Mapping):
        raise InvalidRequestError(f"{where} must be an object with role and content, not {_kind(raw)}")
    role = raw.get("role")
    if role == "function":
        role = "tool"
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{where}.role is {role!r}: use one of {', '.join(sorted(ROLES))}")
    message: Message = {"role": role, "content": content_text(raw.get("content"), where)}
    if role == "assistant":
        reasoning = next((raw[field] for field in REASONING_FIELDS if isinstance(raw.get(field), str)), "")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = raw.get("tool_calls")
        if calls is not None and not isinstance(calls, list | tuple):
            raise InvalidRequestError(f"{where}.tool_calls must be a list, not {_kind(calls)}")
        if not calls and raw.get("function_call"):  # the form from before `tools`
            calls = [{"function": raw["function_call"]}]
        if calls:
            message["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif role == "tool":
        message["tool_call_id"] = str(raw.get("tool_call_id") or "")
    if role != "assistant" and raw.get("name"):
        message["name"] = str(raw["name"])
    return message


def plain_messages(raw: Sequence[Any]) -> list[Message]:
    """All messages of a request in plain form."""
    return [plain_message(message, f"messages[{index}]") for index, message in enumerate(raw)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Not JSON: some agents send back what the model wrote; templates get it as text. So does what is nested so
        # deeply that templates and encoders could not follow.
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments) if arguments.strip() else {}
            arguments = parsed if _shallow(parsed) else arguments
    elif arguments is None:
        arguments = {}
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return True
    return False


def message_key(message: Message, call_order: Mapping[str, int]) -> MessageKey:
    """The comparison key of a plain message. `call_order`: the positions of the last assistant message's tool calls."""
    role = message["role"]
    if role == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        values = tuple((one["name"], stable_json(_numbers_by_value(one["arguments"]))) for one in functions)
        return (role, split_reasoning(message)[1].strip(), values)
    if role == "tool":
        identity = message["tool_call_id"]
        return (role, message["content"], call_order.get(identity, identity), message.get("name", ""))
    return (role, message["content"], message.get("name", ""))


def split_reasoning(message: Message) -> tuple[str, str]:
    """(reasoning, answer) of an assistant message, whether the reasoning has its own field or is inside `<think>`."""
    content: str = message["content"]
    if "reasoning_content" not in message and "</think>" in content and (found := INLINE_REASONING.match(content)):
        return found[1], found[2]
    return message.get("reasoning_content", ""), content


def call_ids(message: Message) -> dict[str, int]:
    """The ids of a message's tool calls, mapped to their positions."""
    return {call["id"]: index for index, call in enumerate(message.get("tool_calls", ())) if call["id"]}


def stable_json(value: Any) -> str:
    """JSON that is equal if and only if the values are."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _numbers_by_value(value: Any) -> Any:
    """The same JSON value with whole numbers as integers: JavaScript reads 2.0 and writes 2."""
    if isinstance(value, dict):
        return {key: _numbers_by_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers_by_value(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def snapshot(raw: Any) -> Any:
    """A copy that is independent of later changes to the original. None if `==` can't distinguish it from a different
    message.

    In Python `1 == True == 1.0`, in JSON not: a message with such scalars is compared by its key alone.
    """
    try:
        return _copy(raw)
    except _Ambiguous:
        return None


class _Ambiguous(Exception):
    pass


def _copy(value: Any) -> Any:
    if value is None or type(value) is str:
        return value
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy(item) for item in value]
    raise _Ambiguous


def _kind(value: Any) -> str:
    return type(value).__name__


Skeleton = tuple[str, ...]
"""The shape of a history: its head (`s`, `d` or `-`) and its last two turns, with one letter per message."""

MAX_PERIOD = 6
TURN_LETTERS = 12
"""How much of a turn's shape matters, as long as no kind of reply is lost. Twice stands for a hundred times."""
STEP = re.compile(r".t*")
"""A reply and the results of its calls, in letters."""
RUN = re.compile(r"(..?)\1{2,}")

LETTERS = {"system": "s", "developer": "d", "user": "u", "tool": "t"}
REPLIES = {  # (reasoning, has content, tool calls) → letter; upper case: with content
    ("", False, 0): "e",
    ("", True, 0): "a",
    ("field", False, 0): "q",
    ("field", True, 0): "r",
    ("inline", True, 0): "i",
    ("", False, 1): "c",
    ("", True, 1): "C",
    ("", False, 2): "m",
    ("", True, 2): "M",
    ("field", False, 1): "k",
    ("field", True, 1): "K",
    ("field", False, 2): "n",
    ("field", True, 2): "N",
    ("inline", True, 1): "J",
    ("inline", True, 2): "P",
}
HOLDS = {name: shape for shape, name in REPLIES.items()}
WITHOUT_REASONING = {name: REPLIES[("", content, calls)] for name, (_, content, calls) in HOLDS.items()}


def letter(message: Message) -> str:
    """The letter for those features of a plain message that can affect a template's structure."""
    role = message["role"]
    if role != "assistant":
        return LETTERS[role]
    content = message["content"]
    reasoning = "field" if "reasoning_content" in message else "inline" if "</think>" in content else ""
    return REPLIES[(reasoning, bool(content), min(2, len(message.get("tool_calls", ()))))]


@lru_cache(maxsize=65536)
def extend_skeleton(skeleton: Skeleton, new: str) -> Skeleton:
    """The shape of a history after one more message."""
    if not skeleton:
        return (new,) if new in "sd" else ("-", new)
    head, *turns = skeleton
    if new == "u" or not turns:
        return (head, *turns[-1:], new)
    return (head, *turns[:-1], _shorten(turns[-1] + new))


def shape_after(skeleton: Skeleton, messages: Sequence[Message]) -> Skeleton:
    """The shape of a history after more messages."""
    for message in messages:
        skeleton = extend_skeleton(skeleton, letter(message))
    return skeleton


def _shorten(turn: str) -> str:
    for period in range(1, MAX_PERIOD + 1):
        if len(turn) >= 3 * period and turn[-3 * period :] == turn[-period:] * 3:
            return turn[:-period]
    if len(turn) > TURN_LETTERS:  # no kind of reply is lost: one with reasoning may be what a template rewrites later
        steps = STEP.findall(turn)
        for index, step in enumerate(steps[:-1]):
            if step in steps[index + 1 :]:
                return "".join(steps[:index] + steps[index + 1 :])
    return turn


class Shape(NamedTuple):
    """The features of a request after a reply that can affect a template: everything but texts and lengths."""

    skeleton: Skeleton
    """The skeleton of the history to which the reply was sampled."""
    reply: str
    new: str
    has_tools: bool
    kwargs: str
    links: str
    """How messages refer to tool calls. Rules don't depend on it: they are given the real ids."""

    @classmethod
    def of(
        cls,
        skeleton: Skeleton,
        reply: Message,
        marks: str,
        new: Sequence[Message],
        has_tools: bool,
        kwargs: str,
        call_ids: Container[str],
    ) -> Shape:
        """`marks`: of the reply's calls. `call_ids`: of all calls so far."""
        links = f"{marks}|{_links(reply, new, call_ids)}"
        return cls(
            skeleton,
            letter(reply),
            _new_letters(new),
            has_tools,
            kwargs,
            RUN.sub(r"\1\1", links) if len(links) > 5 else links,
        )


def _links(reply: Message, new: Sequence[Message], call_ids: Container[str]) -> str:
    """A mark for each new message: does it answer the next call, another one, an earlier one, or none?"""
    marks = ""
    ids = [call["id"] for call in reply.get("tool_calls", ())]
    answered = 0
    for message in new:
        mark = ","
        if message["role"] == "assistant":
            ids, answered = [call["id"] for call in message.get("tool_calls", ())], 0
        elif message["role"] == "tool":
            mark = _answers(message["tool_call_id"], ids[answered : answered + 1], ids, call_ids)
            answered += 1
        marks += mark + ("n" if "name" in message else "") + ("" if message["content"] else "0")
    return marks + ("" if answered == len(ids) else "p")


def _answers(identity: str, next_id: Sequence[str], ids: Sequence[str], call_ids: Container[str]) -> str:
    if not identity:
        return "-"
    return "." if identity in next_id else "<" if identity in ids else "e" if identity in call_ids else "?"


def _new_letters(new: Sequence[Message]) -> str:
    letters = "".join(map(letter, new))
    while "ttt" in letters:
        letters = letters.replace("ttt", "tt")
    return letters


ReasoningHistory = Literal["template", "keep"]
AbandonedCalls = Literal["mask", "train"]
SharedTokenLoss = Literal["once", "multiplicity"]


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """Limits and rules of a run, the same for all its episodes."""

    max_model_len: int = 18000
    """Prompt + reply of one call."""
    max_prompt_length: int = 3000
    """The longest prompt of a linear sample."""
    max_response_length: int = 15000
    """The longest response of a linear sample."""
    max_response_length_in_one_turn: int = 4096
    max_steps: int = 30
    """Model calls per agent and episode."""
    max_sample_per_task: int = 30
    """Linear samples per episode."""
    reasoning_history: ReasoningHistory = "template"
    abandoned_calls: AbandonedCalls = "mask"
    shared_token_loss: SharedTokenLoss = "once"
    checks: tuple[str, ...] = ("nonsense",)
    """`compute_madness_checklist`."""
    terminate_on_abnormal: bool = True
    call_prefix: str = "call"
    """What the names of its calls begin with, and so the ids of replies: unique within the episode."""
    detect_forks: bool = True
    """Whether to look for the message that caused a fork (`detect_timeline_snap`); this changes no tree nor credit."""

    @classmethod
    def from_config(cls, config: Any) -> TrackerSettings:
        """Read a loaded `Config`."""
        data, rollout, tracker = config.ajet.data, config.ajet.rollout, config.ajet.context_tracker
        return cls(
            max_model_len=rollout.max_model_len,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            max_response_length_in_one_turn=rollout.max_response_length_in_one_turn,
            max_steps=rollout.multi_turn.max_steps,
            max_sample_per_task=rollout.multi_turn.max_sample_per_task,
            reasoning_history=rollout.reasoning_history,
            abandoned_calls=rollout.abandoned_calls,
            shared_token_loss=tracker.shared_token_loss,
            checks=tuple(rollout.compute_madness_checklist),
            terminate_on_abnormal=rollout.agent_madness_termination,
            detect_forks=tracker.detect_timeline_snap,
        )
