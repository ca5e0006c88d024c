"""The items of OpenAI's Responses protocol: read as chat messages, and written from a reply.

A reply becomes up to three kinds of items: its reasoning, its text, and one item per tool call. Read back, neighbouring
items of these kinds are one assistant message again, so a conversation sent by items extends the same recorded call as
one sent by messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ajet.gateway import protocol
from ajet.gateway.protocol import (
    NO_EFFECT,
    REFUSED,
    UNSET,
    BadField,
    Caller,
    of_type,
    read_model,
    read_sampling,
    read_tool_choice,
    refuse_unsupported,
)
from ajet.schema.chat import DEFAULT_TARGET, ChatReply, ChatRequest, Message, Tool
from ajet.schema.errors import UnsupportedContentError

LONGEST_NAMESPACE = 200
"""Each of its functions is known by a name that begins with it."""
LEFT_OUT = ("web_search", "web_search_preview", "tool_search")


class ResponsesToolForm(NamedTuple):
    """How the client declared a tool."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponsesTools(NamedTuple):
    """The tools of one request."""

    tools: list[Tool]
    forms: dict[str, ResponsesToolForm]
    """By the name under which the model knows them; plain functions aren't in here."""


def joined_name(name: str, namespace: Any) -> str:
    """The name under which the model knows a function."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def custom_input(arguments: str) -> str:
    """The text that a call gives to a custom tool."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The arguments of a call that gives this text to a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def read_tools(values: list[Any], where: str = "tools", namespace: str = "") -> ResponsesTools:
    """Read and check the tools."""
    read = ResponsesTools([], {})
    for index, value in enumerate(values):
        _read_tool(value, f"{where}[{index}]", namespace, read)
    return read


def _read_tool(value: Any, where: str, namespace: str, read: ResponsesTools) -> None:
    tool_type = of_type(value, where, dict, "an object").get("type")
    if tool_type in LEFT_OUT:
        return
    if tool_type not in ("function", "custom", "namespace"):
        raise BadField(
            f"{where}.type", f"{where}: only function, custom and namespace tools are supported, not {tool_type!r:.40}"
        )
    name, description = value.get("name"), value.get("description")
    if not isinstance(name, str) or not name:
        raise BadField(f"{where}.name", f"{where} needs a name")
    if not isinstance(description, str | None):
        raise BadField(f"{where}.description", f"{where}.description must be a string")
    if tool_type == "namespace":
        if len(name) > LONGEST_NAMESPACE:
            raise BadField(f"{where}.name", f"{where}.name has at most {LONGEST_NAMESPACE} characters")
        nested = of_type(value.get("tools"), f"{where}.tools", list, "an array")
        inner = read_tools(nested, f"{where}.tools", name)
        read.tools.extend(inner.tools)
        read.forms.update(inner.forms)
        return
    known = joined_name(name, namespace)
    function = _custom(value, where) if tool_type == "custom" else _function(value, where)
    if namespace or tool_type == "custom":
        read.forms[known] = ResponsesToolForm(name, namespace, tool_type == "custom")
    read.tools.append({"type": "function", "function": {**function, "name": known}})


def _function(value: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(value.get("parameters"), dict | None):
        raise BadField(f"{where}.parameters", f"{where}.parameters must be a JSON schema")
    return {key: value[key] for key in ("name", "description", "parameters", "strict") if key in value}


def _custom(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Free text as a function's only argument."""
    form = value.get("format")
    if form is not None:
        of_type(form, f"{where}.format", dict, "an object")
    description = value.get("description") or ""
    if form and form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        description = f"{description}\n\nIts input follows this {syntax} grammar:\n{definition}".strip()
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": value["name"], "description": description, "parameters": schema}


Item = dict[str, Any]
FindItem = Callable[[str], Item | None]
"""Finds an item of an earlier reply by its id."""

_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "system", "developer", "assistant")
_OUR_ID = re.compile(r"(?:rs|msg|fc|ctc)_(.+)_\d+")

# ---------------------------------------------------------------- reading


def read_input(value: Any, find: FindItem) -> list[Message]:
    """`input`: a string, or a list of items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        return []
    messages, known = _Messages(), set[str]()
    for index, item in enumerate(of_type(value, "input", list, "a string or a list of items")):
        messages.add(_resolved(item, f"input[{index}]", find, known), f"input[{index}]")
    return messages.whole()


def _resolved(item: Any, where: str, find: FindItem, known: set[str]) -> Item:
    """The item itself. `known`: those that have been referred to, each of which may be large."""
    given: Item = of_type(item, where, dict, "an object")
    if given.get("type") != "item_reference":
        return given
    item_id = _text_field(given, "id", where)
    found = None if item_id in known else find(item_id)
    if found is None:
        why = "twice to an item" if item_id in known else "to an item that isn't stored: send the item itself"
        raise BadField(f"{where}.id", f"{where} refers {why}")
    known.add(item_id)
    return found


class _Messages:
    """Messages, of which the last may still grow while items of the same reply follow."""

    def __init__(self) -> None:
        self.done: list[Message] = []
        self._open: Message | None = None
        """The assistant message at the end."""
        self._of = ""
        """The call that it is the reply of, if its items have our ids."""
        self._text_over = False
        """Its text has come, and no tool call since."""

    def whole(self) -> list[Message]:
        """All of them. A reply's texts are lists of their pieces until here."""
        for message in self.done:
            for key in ("content", "reasoning_content"):
                if isinstance(message.get(key), list):
                    message[key] = "".join(message[key])
        return self.done

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
        message = self._reply(item, fresh=self._text_over)
        message["content"].append(text)
        self._text_over = True

    def _reasoning(self, item: Item, where: str) -> None:
        """Its text, if there is any to read. What clients leave out, the recorded call knows."""
        message = self._reply(item, fresh=self._open is not None)
        content = item.get("content")
        content = [] if content is None else of_type(content, f"{where}.content", list, "an array")
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadField(f"{where}.content", f"{where}.content must be a list of reasoning_text parts")
        if text := "".join(map(str, parts)):
            message.setdefault("reasoning_content", []).append(text)

    def _call(self, item: Item, where: str) -> None:
        call_id, name = _text_field(item, "call_id", where), _text_field(item, "name", where)
        if item["type"] == "custom_tool_call":
            arguments = custom_arguments(_text_field(item, "input", where))
        else:
            arguments = _text_field(item, "arguments", where)
        name = joined_name(name, item.get("namespace"))
        message = self._reply(item, fresh=False)
        self._text_over = False
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _reply(self, item: Item, *, fresh: bool) -> Message:
        """The assistant message that the item belongs to. `fresh`: it begins one, unless the ids tell."""
        found = _OUR_ID.fullmatch(str(item.get("id")))
        call = found[1] if found else ""
        if call and self._of:  # a reply may think, say something, and think again
            fresh = call != self._of
        if self._open is None or fresh:
            self._of = call
            self._open = {"role": "assistant", "content": []}
            self._text_over = False
            self.done.append(self._open)
        return self._open

    def _close(self, message: Message) -> None:
        self.done.append(message)
        self._open, self._text_over = None, False


def _text_field(item: Item, key: str, where: str) -> str:
    return of_type(item.get(key), f"{where}.{key}", str, "a string")


def _content_text(content: Any, where: str) -> str:
    """The text of a string or of a list of text parts, joined as in chat messages."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(of_type(content, where, list, "a string or a list of parts")):
        part_type = part.get("type") if isinstance(part, dict) else None
        key = _TEXT.get(part_type) if isinstance(part_type, str) else None
        if key is None:
            raise UnsupportedContentError(f"{where}[{index}] is of type {part_type!r:.40}: this model takes only text")
        texts.append(_text_field(part, key, f"{where}[{index}]"))
    return "\n".join(texts)


def read_text_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format`."""
    given = protocol.mapping(text, "format")
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
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    form = tools.forms.get(name, ResponsesToolForm(name))
    item = {"id": f"fc_{call_id}_{index}", "status": status, "call_id": call["id"], "name": form.name}
    if form.custom:
        return {**item, "id": f"ctc_{call_id}_{index}", "type": "custom_tool_call", "input": custom_input(arguments)}
    namespace = {"namespace": form.namespace} if form.namespace else {}
    return {**item, "type": "function_call", "arguments": arguments, **namespace}


_HONOURED = frozenset(
    {
        "model", "input", "instructions", "previous_response_id", "store", "stream", "tools", "tool_choice",
        "parallel_tool_calls", "text", "temperature", "top_p", "max_output_tokens", "truncation", "background",
        "include", "top_logprobs", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "seed", "ignore_eos", "chat_template_kwargs", "return_token_ids",
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning", "stream_options", "priority", "client_metadata",
    }
)  # fmt: skip
"""Fields that are accepted and ignored: they don't concern the model, or are hints (`reasoning.effort`)."""
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", LOGPROBS)
"""What `include` may ask for. The reasoning is always there, in plain text."""


@dataclass(slots=True)
class ResponseCall:
    """A request, and what its answer repeats or depends on."""

    request: ChatRequest
    body: dict[str, Any]
    model: str
    tools: ResponsesTools
    logprobs: bool
    """The text comes with its log-probabilities."""
    before: list[Message]
    """The conversation that `previous_response_id` stands for."""
    new: list[Message]
    """The messages of `input`."""
    store: bool
    stream: bool
    token_ids: bool


def read_response_call(body: dict[str, Any], caller: Caller) -> ResponseCall:
    """Check a request's body."""
    _refuse(body)
    asked = read_model(body, caller)
    before = _previous(body, caller)
    new = read_input(body.get("input"), partial(caller.session.responses.item, agent=caller.agent))
    instructions = protocol.text(body, "instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += before + new
    if not new and not before:
        raise BadField("input", "input must be a string or a list of at least one item")
    tools = read_tools(protocol.array(body, "tools"))
    choice = read_tool_choice(body.get("tool_choice"), tools.tools)
    limit = protocol.integer(body, "max_output_tokens", 1, 10**9)
    logprobs = protocol.integer(body, "top_logprobs", 0, 20) or 0
    request = ChatRequest(
        messages=messages,
        tools=tools.tools,
        tool_choice=choice.choice,
        allowed_tools=choice.allowed,
        parallel_tool_calls=protocol.flag(body, "parallel_tool_calls", True),
        sampling=read_sampling({**body, "max_tokens": limit}, caller.session.settings.default_sampling),
        agent=asked.agent,
        target=caller.target or DEFAULT_TARGET,
        trainable=asked.trainable,
        top_logprobs=logprobs,
        response_format=read_text_format(protocol.mapping(body, "text")),
        chat_template_kwargs=protocol.mapping(body, "chat_template_kwargs"),
    )
    return ResponseCall(
        request=request,
        body=body,
        model=asked.name,
        tools=tools,
        logprobs=bool(logprobs) or LOGPROBS in protocol.array(body, "include"),
        before=before,
        new=new,
        store=protocol.flag(body, "store", True),
        stream=protocol.flag(body, "stream"),
        token_ids=protocol.flag(body, "return_token_ids"),
    )


def _refuse(body: dict[str, Any]) -> None:
    refuse_unsupported(body)
    for key in body.keys() - _HONOURED - _WITHOUT_EFFECT - REFUSED.keys() - {"best_of"}:
        if body[key] not in UNSET:
            raise BadField(key, f"{key:.60} is not supported: {NO_EFFECT}")
    if protocol.flag(body, "background"):
        raise BadField("background", "background is not supported: a response is complete when it is answered")
    if protocol.text(body, "truncation", "disabled") != "disabled":
        raise BadField("truncation", "truncation must be 'disabled': conversations are taken whole or refused")
    for value in protocol.array(body, "include"):
        if value not in _INCLUDED:
            raise BadField("include", f"include: {value!r:.60} is not supported; only {', '.join(_INCLUDED)}")


def _previous(body: dict[str, Any], caller: Caller) -> list[Message]:
    """The conversation of `previous_response_id`. An agent's key reaches that agent's responses only."""
    response_id = protocol.text(body, "previous_response_id")
    if not response_id:
        return []
    stored = caller.session.responses.get(response_id, caller.agent)
    if stored is None:
        raise BadField(
            "previous_response_id",
            f"there is no stored response {response_id!r:.80} in this episode: send the whole conversation as input",
        )
    return stored.messages
