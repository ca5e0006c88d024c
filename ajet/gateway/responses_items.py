"""The items of OpenAI's Responses protocol: read as chat messages, and written from a reply.

A reply becomes up to three kinds of items: its reasoning, its text, and one item per tool call. Read back, neighbouring
items of these kinds are one assistant message again, so a conversation sent by items extends the same recorded call as
one sent by messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ajet.gateway import fields
from ajet.gateway.fields import BadField, kind
from ajet.gateway.responses_tools import ResponsesTools, custom_arguments, joined_name
from ajet.schema.chat import ChatReply, Message
from ajet.schema.errors import UnsupportedContentError

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]
"""Finds an item of an earlier reply by its id."""

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "system", "developer", "assistant")

# ---------------------------------------------------------------- reading


def read_input(value: Any, find: FindItem) -> list[Message]:
    """`input`: a string, or a list of items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadField("input", f"input must be a string or a list of items, not {kind(value)}")
    messages = _Messages()
    for index, item in enumerate(value):
        messages.add(_resolved(item, f"input[{index}]", find), f"input[{index}]")
    return messages.done


def _resolved(item: Any, where: str, find: FindItem) -> Item:
    if not isinstance(item, dict):
        raise BadField(where, f"{where} must be an object, not {kind(item)}")
    if item.get("type") != "item_reference":
        return item
    found = find(_text_field(item, "id", where))
    if found is None:
        raise BadField(f"{where}.id", f"{where} refers to an item that isn't stored: send the item itself")
    return found


class _Messages:
    """Messages, of which the last may still grow while items of the same reply follow."""

    def __init__(self) -> None:
        self.done: list[Message] = []
        self._open: Message | None = None
        """The assistant message at the end."""
        self._text_over = False
        """Its text has come, and no tool call since."""

    def add(self, item: Item, where: str) -> None:
        item_type = item.get("type") or "message"
        if item_type == "message":
            self._message(item, where)
        elif item_type == "reasoning":
            self._reasoning(item, where)
        elif item_type in ("function_call", "custom_tool_call"):
            self._call(item, where)
        elif item_type in ("function_call_output", "custom_tool_call_output"):
            call_id = _text_field(item, "call_id", where)
            content = _content_text(item.get("output"), f"{where}.output")
            self._close({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise BadField(f"{where}.type", f"{where}: items of type {item_type!r:.60} are not supported")

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise BadField(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r:.40}")
        text = _content_text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._close({"role": role, "content": text})
            return
        message = self._reply(fresh=self._text_over)
        message["content"] += text
        self._text_over = True

    def _reasoning(self, item: Item, where: str) -> None:
        """Its text, if there is any to read. What clients leave out, the recorded call knows."""
        message = self._reply(fresh=self._open is not None)
        content = item.get("content")
        if not isinstance(content, list | None):
            raise BadField(f"{where}.content", f"{where}.content must be an array, not {kind(content)}")
        parts = [part.get("text") if isinstance(part, dict) else None for part in content or []]
        if not all(isinstance(part, str) for part in parts):
            raise BadField(f"{where}.content", f"{where}.content must be a list of reasoning_text parts")
        if text := "".join(map(str, parts)):
            message["reasoning_content"] = text

    def _call(self, item: Item, where: str) -> None:
        call_id, name = _text_field(item, "call_id", where), _text_field(item, "name", where)
        if item["type"] == "custom_tool_call":
            arguments = custom_arguments(_text_field(item, "input", where))
        else:
            arguments = _text_field(item, "arguments", where)
        name = joined_name(name, item.get("namespace"))
        message = self._reply(fresh=False)
        self._text_over = False
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _reply(self, *, fresh: bool) -> Message:
        """The assistant message that the item belongs to."""
        if self._open is None or fresh:
            self._open = {"role": "assistant", "content": ""}
            self._text_over = False
            self.done.append(self._open)
        return self._open

    def _close(self, message: Message) -> None:
        self.done.append(message)
        self._open, self._text_over = None, False


def _text_field(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise BadField(f"{where}.{key}", f"{where}.{key} must be a string, not {kind(value)}")
    return value


def _content_text(content: Any, where: str) -> str:
    """The text of a string or of a list of text parts, joined as in chat messages."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(where, f"{where} must be a string or a list of parts, not {kind(content)}")
    texts = []
    for index, part in enumerate(content):
        part_type = part.get("type") if isinstance(part, dict) else None
        key = _TEXT.get(part_type) if isinstance(part_type, str) else None
        if key is None:
            raise UnsupportedContentError(f"{where}[{index}] is of type {part_type!r:.40}: this model takes only text")
        texts.append(_text_field(part, key, f"{where}[{index}]"))
    return "\n".join(texts)


def read_text_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format`."""
    given = fields.mapping(text, "format")
    if not given:
        return None
    if given.get("type") not in ("text", "json_object", "json_schema"):
        raise BadField("text.format.type", "text.format.type must be text, json_object or json_schema")
    if given["type"] != "json_schema":
        return {"type": given["type"]}
    return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}


# ---------------------------------------------------------------- writing


def reply_items(reply: ChatReply, tools: ResponsesTools) -> list[Item]:
    """The output items of a whole reply. There is a text item even without text, unless there are tool calls."""
    message = reply.message
    items: list[Item] = []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(reply.call_id, len(items), reasoning))
    calls = message.get("tool_calls", [])
    if message.get("content") or not calls:
        items.append(text_item(reply.call_id, len(items), message.get("content") or "", _status(reply)))
    for call in calls:
        items.append(call_item(reply.call_id, len(items), call, tools))
    return items


def _status(reply: ChatReply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def reasoning_item(call_id: str, index: int, text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{call_id}_{index}", "type": "reasoning", "summary": [], "content": content}


def text_item(call_id: str, index: int, text: str, status: str = "completed") -> Item:
    content = [text_part(text)]
    return {
        "id": f"msg_{call_id}_{index}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call_id: str, index: int, call: dict[str, Any], tools: ResponsesTools, status: str = "completed") -> Item:
    item = tools.call_item(call)
    prefix = "ctc" if item["type"] == "custom_tool_call" else "fc"
    return {"id": f"{prefix}_{call_id}_{index}", "status": status, **item}
